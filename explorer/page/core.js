// State, language, theme, and the few helpers that every section uses. Text enters the document as text only.

const STRINGS = JSON.parse(document.getElementById('strings').textContent);
const model = facts.model;
const NUM_TOKENS = facts.tokens.length;
const PROMPT_TOKENS = facts.num_prompt_tokens;
const HEADS_PER_KEY = model.num_heads / model.num_key_value_heads;
const HAS_LIMITS = model.layers.some((layer) => layer.window !== null || layer.chunk !== null);
const ATTENDING_LAYERS = model.layers.filter((layer) => layer.attends).length;
const KEEPING_LAYERS = facts.cache_bytes_per_token.filter((column) => column > 0).length; // that add columns
const CALM = matchMedia('(prefers-reduced-motion: reduce)');
const DARK = matchMedia('(prefers-color-scheme: dark)');

const state = {
  layer: Math.min(Math.floor(model.num_layers / 2), model.num_layers - 1),
  head: 0,
  token: PROMPT_TOKENS - 1,
  step: 0,
  language: (navigator.language || 'en').toLowerCase().startsWith('zh') ? 'zh' : 'en',
};

function remember(key, value) {
  try {
    localStorage.setItem(`tercet-${key}`, value);
  } catch {
    // A browser that keeps nothing for files still shows the page.
  }
}

function recall(key) {
  try {
    return localStorage.getItem(`tercet-${key}`);
  } catch {
    return null;
  }
}

// ---- Elements ----

function byId(id) {
  return document.getElementById(id);
}

/** An element; properties that begin with "on" listen, "class" and aria-… are attributes; children are nodes or text. */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (key in node && !key.includes('-')) node[key] = value;
    else node.setAttribute(key, value === true ? '' : value);
  }
  node.append(...present(children));
  return node;
}

function fill(node, ...children) {
  node.replaceChildren(...present(children));
}

/** Nested lists made flat, without what a condition left out. */
function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

// ---- Language ----

const missing = new Set(); // keys without a string, for the tests

function lookUp(key) {
  if (!(key in STRINGS[state.language])) missing.add(`${state.language}: ${key}`);
  return STRINGS[state.language][key] ?? key;
}

function put(text, values) {
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** The same where a value may be nodes. */
function putNodes(text, values) {
  return text.split(/(\{\w+\})/).map((piece) => {
    const name = piece.slice(1, -1);
    return piece[0] === '{' && name in values ? (Array.isArray(values[name]) ? values[name] : String(values[name])) : piece;
  });
}

/** A string of the chosen language as plain text. */
function say(key, values = {}) {
  return put(lookUp(key).replace(/[*`]/g, ''), values);
}

/** The same as nodes: *term* is a term, `code` is code; what is put in is never read as either. */
function rich(key, values = {}) {
  return lookUp(key)
    .split(/(\*[^*]+\*|`[^`]+`)/)
    .filter(Boolean)
    .map((piece) => {
      if (piece[0] === '*') return el('dfn', {}, put(piece.slice(1, -1), values));
      if (piece[0] === '`') return el('code', {}, put(piece.slice(1, -1), values));
      return putNodes(piece, values);
    });
}

function para(key, values, kind = '') {
  return el('p', { class: kind || null }, rich(key, values));
}

/** "layer 3" or "layers 0, 3, 6". */
function layerList(layers) {
  return say(layers.length === 1 ? 'layer.one' : 'layer.several', { list: layers.join(', ') });
}

/** Names and versions, which no language changes. */
function versionList() {
  return Object.entries(facts.versions)
    .map(([name, version], i) => [
      `${i ? ' · ' : ''}${name === 'processor' ? say('about.processor') : name} `,
      el('span', { class: 'proper-name', lang: 'en' }, version),
    ])
    .flat();
}

// ---- Numbers ----

function count(value) {
  return Math.round(value).toLocaleString('en-US');
}

/** A few significant digits; "0.0500" keeps its zeros, as a measured number should. */
function num(value, digits = 3) {
  if (!Number.isFinite(value)) return value < 0 ? '−∞' : '–';
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(1) : value.toPrecision(digits);
  return text.replace('-', '−');
}

function percent(value) {
  if (value > 0 && value < 0.0001) return '<0.01%';
  return `${(value * 100).toFixed(value < 0.0995 ? 2 : 1)}%`;
}

function scaled(value, base, units) {
  let power = 0;
  while (value >= base && power < units.length - 1) {
    value /= base;
    power += 1;
  }
  return `${power === 0 ? count(value) : value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${units[power]}`;
}

function bytes(value) {
  return scaled(value, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB']);
}

function flops(value) {
  return scaled(value, 1000, ['FLOP', 'kFLOP', 'MFLOP', 'GFLOP', 'TFLOP', 'PFLOP']);
}

function duration(seconds) {
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms` : `${seconds.toFixed(2)} s`;
}

function shape(...sizes) {
  return `(${sizes.map(count).join(', ')})`;
}

// ---- Tokens as a reader sees them ----

const INVISIBLE = /[ \p{Cc}\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu;
const SIGNS = { ' ': '·', '\n': '⏎', '\t': '⇥' };

/** A sign for a character that shows nothing; control characters as bytes are spelt, others by their number. */
function signOf(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase();
  return SIGNS[character] ?? (character < '\x80' ? `<${code.padStart(2, '0')}>` : `<U+${code.padStart(4, '0')}>`);
}

/**
 * Spaces, line breaks and what else is invisible as signs. Letters that run from right to left are isolated, so that
 * numbers and arrows beside them stay where they are. The text itself is never changed elsewhere.
 */
function visible(text) {
  // Joiners belong to the letters and pictures that they join, unless they are alone.
  const hidden = /^[\u200c\u200d\ufe00-\ufe0f]+$/.test(text) ? /./gu : INVISIBLE;
  const shown = text.replace(hidden, signOf) || '∅';
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(shown) ? `\u2068${shown}\u2069` : shown;
}

/** The text that tokens spell together, in pieces between special ones: a character may be several tokens. */
function spelt(from, to) {
  const pieces = [];
  for (const token of facts.tokens.slice(from, to)) {
    if (token.is_special) pieces.push({ special: token.text });
    else if (pieces[pieces.length - 1]?.hex) pieces[pieces.length - 1].hex += token.bytes;
    else if (token.bytes) pieces.push({ hex: token.bytes });
  }
  return pieces.map(({ special, hex }) =>
    hex ? new TextDecoder().decode(Uint8Array.from(hex.match(/../g), (byte) => parseInt(byte, 16))) : { special },
  );
}

function tokenText(index) {
  return visible(facts.tokens[index].text);
}

function idText(id) {
  const text = facts.vocabulary[id];
  return text === undefined ? `#${id}` : visible(text);
}

function clip(text, length) {
  const letters = [...text];
  const end = text.endsWith('\u2069') ? '\u2069' : ''; // of isolated letters
  return letters.length > length ? `${letters.slice(0, length - 1).join('')}…${end}` : text;
}

// ---- Colours of the theme, for canvases ----

let palette = {};

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const names = ['ink', 'faint', 'line', 'ground', 'panel', 'accent', 'minus', 'key', 'value', 'heat', 'mask'];
  palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  palette.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  palette.rgb = Object.fromEntries(names.map((name) => [name, channels(palette[name])]));
}

function channels(colour) {
  const digits = colour.replace('#', '');
  return [0, 2, 4].map((i) => parseInt(digits.slice(i, i + 2), 16));
}

/** Black or white, whichever can be read better on a colour of three channels: at least 4.58 to 1. */
function inkOn(colour) {
  const [r, g, b] = colour.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000000' : '#ffffff';
}

/** Fills an element with a colour of three channels, and writes on it so that it can be read. */
function tint(node, colour) {
  node.style.background = colour ? `rgb(${colour.map(Math.round).join(',')})` : '';
  node.style.color = colour ? inkOn(colour) : '';
}

function mixed(from, to, share) {
  const [a, b] = [palette.rgb[from], palette.rgb[to]];
  return `rgb(${a.map((channel, i) => Math.round(channel + (b[i] - channel) * share)).join(',')})`;
}

/** A canvas of this size in CSS pixels, cleared; draw(context, width, height) paints it. */
function paint(canvas, width, height, draw) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.save(); // the next picture begins with the defaults, whatever this one sets
  draw(context, width, height);
  context.restore();
}

// ---- Views: each draws one section, again when what it depends on changes ----

const views = [];

/**
 * @param {string} id Of the section.
 * @param {string[]} depends Keys of `state` after whose change it is drawn again; language, theme and width always.
 * @param {function(HTMLElement): (void|Promise<void>)} draw
 */
function view(id, depends, draw) {
  views.push({ id, depends, draw, dirty: true, near: false });
}

function change(patch) {
  const changed = Object.keys(patch).filter((key) => state[key] !== patch[key]);
  if (!changed.length) return;
  Object.assign(state, patch);
  for (const item of views) if (item.depends.some((key) => changed.includes(key))) item.dirty = true;
  drawNear();
}

function drawAgain() {
  for (const item of views) item.dirty = true;
  return drawNear();
}

/** Draws a section; what had focus in it has it again, though it be a new element. */
async function drawOne(item) {
  item.dirty = false;
  const section = byId(item.id);
  const name = section.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  await item.draw(section);
  for (const row of section.querySelectorAll('.token-row')) showChosen(row);
  if (name && !section.contains(document.activeElement)) {
    section.querySelector(`[data-focus="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
  }
}

/** Long rows scroll: the token that matters stays in sight. */
function showChosen(row) {
  const token = row.querySelector('[aria-selected="true"]') ?? [...row.querySelectorAll('.asked')].pop();
  if (!token || row.scrollHeight <= row.clientHeight) return;
  row.scrollTop = token.offsetTop - row.offsetTop - row.clientHeight / 2;
}

function drawNear() {
  return Promise.all(views.filter((item) => item.dirty && item.near).map(drawOne));
}

function drawAll() {
  return Promise.all(views.filter((item) => item.dirty).map(drawOne));
}

/** Heading and first sentences of a section, numbered. */
function heading(id, values = {}, intro = `${id}.intro`) {
  return [el('h2', { id: `${id}-title` }, say(`${id}.title`)), para(intro, values, 'intro')];
}

/** What the page does not hold of a part, and why. */
function absence(...parts) {
  const found = facts.left_out.filter((item) => parts.includes(item.part));
  return found.length
    ? el(
        'div',
        { class: 'absent', role: 'note' },
        found.map((item) => el('p', {}, absenceText(item))),
      )
    : null;
}

/** Parts of the page that are there although the record says something about them: a remark, no absence. */
const ALWAYS_THERE = ['tokens', 'weight_bytes_read', 'logits', 'embeddings', 'hidden'];

function absenceText({ part, reason, values }) {
  const there = ALWAYS_THERE.includes(part) || has(part);
  return say(there ? 'absent.note' : 'absent.lead', {
    part: say(`absent.part.${part}`),
    reason: say(`reason.${reason}`, values),
  });
}
