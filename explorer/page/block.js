// One block as a diagram: each part a button with its shape in this run; the panel beside it shows its numbers.

let chosenPart = 'scores';
let phase = 'prefill';

/** The parts in the order of computation, with the columns and the rows of the grid that each takes. */
function blockParts() {
  const layer = model.layers[state.layer];
  const parts = [];
  let row = 0;
  const whole = (name) => parts.push([name, '2 / 5', String((row += 1))]);
  whole('input');
  if (layer.attends || layer.mixer) whole('norm1');
  if (layer.attends) {
    row += 1;
    parts.push(['q', '2 / 3', String(row)], ['k', '3 / 4', String(row)], ['v', '4 / 5', String(row)]);
    const inner = [...(model.positions === 'rotary' ? ['rotate'] : []), 'scores', 'mask', 'softmax'];
    const first = row + 1;
    for (const name of inner) {
      if (name === 'scores') parts.push(['cache', '4 / 5', `${first} / ${first + inner.length}`]);
      parts.push([name, '2 / 4', String((row += 1))]);
    }
    whole('weighted');
    whole('output');
  } else if (layer.mixer) {
    whole('mixer');
  }
  if (layer.attends || layer.mixer) whole('add1');
  if (layer.mlp !== 'none') {
    whole('norm2');
    row += 1;
    parts.push(['expand', '2 / 3', String(row)], ['activation', '3 / 4', String(row)], ['contract', '4 / 5', String(row)]);
    whole('add2');
  }
  return parts;
}

/** The residual stream beside the parts: from the input to the first sum, and from there to the second. */
function residualLines(parts) {
  const row = (name) => Number(parts.find(([part]) => part === name)[2]);
  const stops = ['input', 'add1', 'add2'].filter((name) => parts.some(([part]) => part === name));
  return stops.slice(1).map((to, i) => {
    const from = stops[i];
    const line = el(
      'div',
      { class: i ? 'residual second' : 'residual', 'aria-hidden': 'true' },
      el('span', {}, say('block.residual')),
    );
    line.style.gridRow = `${row(from)} / ${row(to) + 1}`;
    return line;
  });
}

/** Shapes by the letters of the legend, with the sizes of the chosen phase and layer. */
function partShapes() {
  const step = facts.steps[phase === 'prefill' ? 0 : Math.max(1, state.step)];
  const [B, T] = [1, step.num_queries];
  const layer = model.layers[state.layer];
  // Prefill computes the scores of all its tokens, and a window masks some; decode has no others than the window's.
  const S = phase === 'prefill' ? T : visibleKeys(layer, step.token);
  const { hidden_size: E, num_heads: H } = model;
  const { num_key_value_heads: K, head_dim: D, mlp_width: F } = layer;
  const stream = [
    ['B', 'T', 'E'],
    [B, T, E],
  ];
  const queries = [
    ['B', 'H', 'T', 'D'],
    [B, H, T, D],
  ];
  const keys = [
    ['B', 'K', 'T', 'D'],
    [B, K, T, D],
  ];
  const cached = [
    ['B', 'K', 'S', 'D'],
    [B, K, S, D],
  ];
  const scores = [
    ['B', 'H', 'T', 'S'],
    [B, H, T, S],
  ];
  const wide = [
    ['B', 'T', 'F'],
    [B, T, F],
  ];
  return {
    input: stream,
    norm1: stream,
    mixer: stream,
    q: queries,
    k: keys,
    v: keys,
    rotate: queries,
    cache: cached,
    scores,
    mask: scores,
    softmax: scores,
    weighted: queries,
    output: stream,
    add1: stream,
    norm2: stream,
    expand: wide,
    activation: wide,
    contract: stream,
    add2: stream,
  };
}

function shapeText([letters, sizes]) {
  return el('span', { class: 'shape' }, `(${letters.join(', ')})`, el('br'), shape(...sizes));
}

/** How many keys the last of so many tokens sees. */
function visibleKeys({ window, chunk }, tokens) {
  return chunk === null ? Math.min(tokens, window ?? Infinity) : ((tokens - 1) % chunk) + 1;
}

/** What is not as in the usual block, of the chosen layer. */
function blockRemarks() {
  const { order, attends, mixer, mlp } = model.layers[state.layer];
  const values = { layer: state.layer, mixer };
  const remark = (key) => para(key, values, 'absent');
  return [
    attends ? null : remark(mixer ? 'block.mixer' : 'block.only_mlp'),
    mlp === 'none' ? remark('block.no_mlp') : null,
    order === 'parallel' ? remark('block.parallel') : null,
    order === 'other' && attends && mlp !== 'none' ? remark('block.unusual') : null,
  ];
}

view('block', ['layer', 'head', 'token', 'step'], async (section) => {
  if (!blockParts().some(([part]) => part === chosenPart)) chosenPart = 'input';
  const panel = await partPanel(chosenPart);
  const introKey = ATTENDING_LAYERS < model.num_layers ? 'block.intro_mixed' : 'block.intro';
  const shapes = partShapes();
  const phases = [['prefill', say('block.prefill', { tokens: PROMPT_TOKENS })]];
  if (facts.has_cache && facts.steps.length > 1) phases.push(['decode', say('block.decode')]);
  const choosePart = (part) => {
    chosenPart = part;
    drawOne(views.find((item) => item.id === 'block'));
  };
  const grid = el(
    'div',
    { class: 'block-grid', role: 'group', 'aria-label': say('block.diagram') },
    residualLines(blockParts()),
    blockParts().map(([part, columns, rows]) => {
      const button = el(
        'button',
        {
          type: 'button',
          class: `part part-${part}`,
          'aria-pressed': String(part === chosenPart),
          'data-focus': `part-${part}`,
          onclick: () => choosePart(part),
        },
        el('span', { class: 'part-name' }, partName(part)),
        shapeText(shapes[part]),
      );
      button.style.gridColumn = columns;
      button.style.gridRow = rows;
      return button;
    }),
  );
  fill(
    section,
    heading('block', { layers: model.num_layers, layer: state.layer, attending: ATTENDING_LAYERS }, introKey),
    choices(say('block.phase'), phases, phase, (value) => {
      phase = value;
      drawOne(views.find((item) => item.id === 'block'));
    }),
    el('p', { class: 'note' }, say('block.legend')),
    blockRemarks(),
    el('div', { class: 'block-wide' }, grid, el('div', { class: 'panel', 'aria-live': 'polite' }, panel)),
  );
  for (const list of section.querySelectorAll('.bars.tall')) {
    const own = list.children[state.token];
    list.scrollTop = own.offsetTop - list.offsetTop - list.clientHeight / 2;
  }
});

function partName(part) {
  const layer = model.layers[state.layer];
  if (part === 'norm1') return normName(layer.attention_input, layer.norm_before_attention);
  if (part === 'norm2') return normName(layer.mlp_input, layer.norm_before_mlp);
  if (part === 'rotate' && layer.rotates === false) return say('part.rotate.name_none');
  return say(`part.${part}.name`, { activation: model.activation, mixer: layer.mixer });
}

/** What stands before a part, by how that is given the stream. */
function normName(input, norm) {
  if (norm) return norm.label;
  return say(input === 'as_is' ? 'part.norm.none' : 'part.norm.unseen');
}
