// The page's arrays: base64 of deflated integers, unpacked when a part of the page first needs them.
// packing.py writes what this file reads.

const facts = JSON.parse(document.getElementById('facts').textContent);
const TAIL_STEPS = 1024;
const unpacked = new Map();

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function inflate(text) {
  if (!window.DecompressionStream) return inflated(fromBase64(text)).buffer;
  const stream = new Blob([fromBase64(text)]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).arrayBuffer();
}

/** Integers of 8 bits as they stand; of 16 bits all low bytes come first, then all high bytes. */
function integers(buffer, offset, count, bits, signed) {
  if (bits === 8) return signed ? new Int8Array(buffer, offset, count) : new Uint8Array(buffer, offset, count);
  const bytes = new Uint8Array(buffer, offset);
  const result = signed ? new Int16Array(count) : new Uint16Array(count);
  for (let i = 0; i < count; i++) result[i] = bytes[i] | (bytes[count + i] << 8);
  return result;
}

function decode(spec, buffer) {
  const count = spec.shape.reduce((a, b) => a * b, 1);
  const width = spec.shape[spec.shape.length - 1];
  const rows = count / width;
  if (spec.kind === 'float32') return new Float32Array(buffer, 0, count);
  if (spec.kind === 'unsigned') return integers(buffer, 0, count, spec.bits, false);
  const values = new Float32Array(count);
  if (spec.kind === 'fraction') {
    const source = integers(buffer, 0, count, spec.bits, false);
    const maximum = 2 ** spec.bits - 1;
    for (let i = 0; i < count; i++) values[i] = source[i] / maximum;
    return values;
  }
  const heads = new Float32Array(buffer, 0, rows);
  const source = integers(buffer, rows * 4, count, spec.bits, spec.kind === 'scaled');
  for (let row = 0; row < rows; row++) {
    let depth = 0;
    for (let i = row * width; i < (row + 1) * width; i++) {
      if (spec.kind === 'scaled') {
        values[i] = source[i] * heads[row];
      } else {
        depth += source[i];
        values[i] = heads[row] - depth / TAIL_STEPS;
      }
    }
  }
  return values;
}

/** Whether the page holds an array of this name. */
function has(name) {
  return name in facts.arrays;
}

/**
 * An array of the page, once for all.
 * @returns {Promise<{shape: number[], values: Float32Array, row: function(...number): Float32Array}>}
 *   row(i, j) is values[i, j, :...], a view.
 */
function load(name) {
  if (!unpacked.has(name)) unpacked.set(name, unpack(name));
  return unpacked.get(name);
}

async function unpack(name) {
  const spec = facts.arrays[name];
  if (document.readyState === 'loading') {
    await new Promise((done) => document.addEventListener('DOMContentLoaded', done, { once: true }));
  }
  const element = document.getElementById(`array-${name}`);
  const values = decode(spec, await inflate(element.textContent.trim()));
  element.remove(); // the text is not needed twice
  const strides = spec.shape.map((_, i) => spec.shape.slice(i + 1).reduce((a, b) => a * b, 1));
  const row = (...indices) => {
    const start = indices.reduce((sum, index, i) => sum + index * strides[i], 0);
    return values.subarray(start, start + strides[indices.length - 1]);
  };
  return { shape: spec.shape, values, row };
}

/** Several arrays at once, those that the page lacks as null. */
async function loadAll(...names) {
  return Promise.all(names.map((name) => (has(name) ? load(name) : null)));
}
