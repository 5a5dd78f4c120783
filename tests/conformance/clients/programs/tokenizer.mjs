// @huggingface/tokenizers on a checkpoint's files: token ids and decoded text of each string.
// Arguments: the package's folder, the checkpoint's folder; the strings come as JSON on standard input.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [packageFolder, folder] = process.argv.slice(2);
const read = (name) => JSON.parse(readFileSync(join(folder, name), "utf-8"));
const manifest = JSON.parse(readFileSync(join(packageFolder, "package.json"), "utf-8"));
const { Tokenizer } = await import(pathToFileURL(join(packageFolder, manifest.main)));
const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));
const texts = JSON.parse(readFileSync(0, "utf-8"));
const ids = texts.map((text) => Array.from(tokenizer.encode(text).ids, Number));
console.log(JSON.stringify({ ids, texts: ids.map((row) => (row.length ? tokenizer.decode(row) : "")) }));
