// The frame of the page: the bar, the top, the footer, and the order in which all is drawn.

/** Each term of the article, and the section that shows it. */
const TERMS = [
  ['token', 'tokens'],
  ['embedding', 'embeddings'],
  ['position', 'embeddings'],
  ['attention', 'attention'],
  ['qkv', 'block'],
  ['mask', 'attention'],
  ['heads', 'attention'],
  ['prefill', 'inference'],
  ['decode', 'inference'],
  ['cache', 'inference'],
  ['ffn', 'ffn'],
  ['expand', 'ffn'],
  ['activation', 'ffn'],
  ['residual', 'block'],
  ['norm', 'block'],
  ['logits', 'lens'],
  ['softmax', 'sampling'],
  ['loss', 'loss'],
  ['weights', 'weights'],
  ['hyperparameters', 'hyperparameters'],
];

const THEMES = ['auto', 'light', 'dark'];
state.theme = THEMES.includes(recall('theme')) ? recall('theme') : 'auto';
if (['en', 'zh'].includes(recall('language'))) state.language = recall('language');

function applyTheme() {
  byId('dark').media = { auto: '(prefers-color-scheme: dark)', light: 'not all', dark: 'all' }[state.theme];
  if (state.theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
  readPalette();
  pictures = null;
}

function drawFrame() {
  document.documentElement.lang = state.language === 'zh' ? 'zh-CN' : 'en';
  for (const node of document.querySelectorAll('[data-text]')) fill(node, rich(node.dataset.text));
  byId('bar-name').textContent = model.name;
  byId('language').textContent = state.language === 'en' ? '中文' : 'English';
  byId('language').lang = state.language === 'en' ? 'zh-CN' : 'en';
  byId('theme').textContent = say(`theme.${state.theme}`);
  byId('theme').setAttribute('aria-label', say('theme.label', { theme: say(`theme.${state.theme}`) }));
  byId('title').textContent = say('title', { name: model.name });
  const text = (from, to) =>
    spelt(from, to).map((piece) => (piece.special ? el('span', { class: 'special' }, piece.special) : piece));
  // Isolated: a mark of direction in the prompt turns round what stands in it alone.
  fill(byId('generated'), el('bdi', {}, text(0, PROMPT_TOKENS)), el('mark', {}, text(PROMPT_TOKENS, NUM_TOKENS)));
  byId('generated-note').textContent = say('generated.note', {
    prompt: PROMPT_TOKENS,
    generated: NUM_TOKENS - PROMPT_TOKENS,
  });
  fill(
    byId('key-facts'),
    fact(say('facts.class'), model.class_name),
    fact(say('facts.parameters'), count(model.num_parameters)),
    fact(say('facts.layers'), String(model.num_layers)),
    fact(
      say('facts.heads'),
      model.num_heads === model.num_key_value_heads
        ? String(model.num_heads)
        : `${model.num_heads} / ${model.num_key_value_heads}`,
    ),
    fact(say('facts.hidden'), count(model.hidden_size)),
    fact(say('facts.vocabulary'), count(model.vocab_size)),
    model.max_positions ? fact(say('facts.context'), count(model.max_positions)) : null,
  );
  fill(
    byId('terms'),
    el('span', { class: 'note' }, say('terms.lead')),
    TERMS.map(([term, section]) => el('a', { href: `#${section}` }, say(`term.${term}`))),
  );
  byId('terms').setAttribute('aria-label', say('terms.lead'));
  drawAsk();
  drawBar();
  drawFooter();
}

/** The box for another prompt, where a server stands behind the page. */
function drawAsk() {
  if (!facts.form_action) return;
  const written = byId('ask').querySelector('form')?.elements; // kept when the language changes
  const box = el('textarea', { name: 'prompt', rows: 2, required: true, id: 'ask-prompt' });
  box.value = written?.prompt.value ?? facts.prompt;
  fill(
    byId('ask'),
    el(
      'form',
      { class: 'ask', method: 'post', action: facts.form_action, onsubmit: showRunning },
      el('input', { type: 'hidden', name: 'language', value: state.language }),
      el('label', { htmlFor: 'ask-prompt' }, say('ask.prompt')),
      box,
      el(
        'label',
        {},
        say('ask.new'),
        el('input', {
          type: 'number',
          name: 'new_tokens',
          min: '1',
          required: true,
          value: written?.new_tokens.value ?? String(Math.max(NUM_TOKENS - PROMPT_TOKENS, 1)),
        }),
      ),
      el('button', { type: 'submit', class: 'control primary', id: 'ask-run' }, say('ask.run')),
    ),
  );
}

/** A run may take minutes, and the browser shows little of it. */
function showRunning() {
  byId('ask-run').disabled = true;
  byId('ask-run').textContent = say('ask.running');
}

// Who comes back to the page finds it as it was left.
window.addEventListener('pageshow', (event) => event.persisted && drawFrame());

/** What all sections show: layer, head and token. */
function drawBar() {
  const pick = (name, many, chosen, label) =>
    el(
      'label',
      {},
      say(`bar.${name}`),
      el(
        'select',
        { id: `pick-${name}`, onchange: (event) => change({ [name]: Number(event.target.value) }) },
        Array.from({ length: many }, (_, i) => el('option', { value: String(i), selected: i === chosen }, label(i))),
      ),
    );
  byId('bar-choice').setAttribute('aria-label', say('bar.label'));
  fill(
    byId('bar-choice'),
    pick('layer', model.num_layers, state.layer, String),
    pick('head', model.num_heads, state.head, String),
    pick('token', NUM_TOKENS, state.token, (i) => `${i} ${clip(tokenText(i), 12)}`),
  );
}

view('bar', ['layer', 'head', 'token'], () => {
  for (const name of ['layer', 'head', 'token']) byId(`pick-${name}`).value = String(state[name]);
});

function drawFooter() {
  const bits = facts.precision;
  const left = facts.left_out.map((item) => el('li', {}, absenceText(item)));
  fill(
    byId('about'),
    el('h2', {}, say('about.title')),
    para('about.how', { shown: count(facts.vector_width), size: count(model.hidden_size) }),
    para('about.precision', { attention: bits.attention_bits, heads: bits.heads_bits }),
    left.length ? [el('p', {}, say('about.left')), el('ul', {}, left)] : para('about.nothing'),
    el(
      'p',
      { class: 'note' },
      versionList(),
    ),
  );
}

byId('language').addEventListener('click', () => {
  state.language = state.language === 'en' ? 'zh' : 'en';
  remember('language', state.language);
  drawFrame();
  drawAgain();
});

byId('theme').addEventListener('click', () => {
  state.theme = THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length];
  remember('theme', state.theme);
  applyTheme();
  drawFrame();
  drawAgain();
});

DARK.addEventListener('change', () => {
  applyTheme();
  drawAgain();
});

let width = window.innerWidth;
window.addEventListener('resize', () => {
  if (window.innerWidth === width) return; // a phone's bar that hides changes the height alone
  width = window.innerWidth;
  drawAgain();
});

applyTheme();
drawFrame();
views.find((item) => item.id === 'bar').near = true;

// Sections are drawn when they come near, and, one at a time, when the browser is idle: none waits for another.
const idle = window.requestIdleCallback ?? ((act) => setTimeout(act, 30));
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) views.find((item) => item.id === entry.target.id).near = entry.isIntersecting;
    drawNear();
  },
  { rootMargin: '400px' },
);
function drawRest() {
  const next = views.find((item) => item.dirty && !item.near);
  if (!next) {
    document.documentElement.dataset.ready = 'true';
    return;
  }
  idle(() => drawOne(next).then(drawRest));
}
document.addEventListener('DOMContentLoaded', () => {
  for (const section of document.querySelectorAll('main section')) watcher.observe(section);
  idle(drawRest);
});

// For those who want the numbers behind the page, in the browser's console.
window.explorer = {
  facts,
  state,
  change,
  load,
  has,
  drawAll,
  scoresOf,
  sortedLogits,
  distribution,
  settings,
  player,
  strings: STRINGS,
  missing,
  inflated,
};
