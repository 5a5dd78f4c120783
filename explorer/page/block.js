// One block as a diagram: each part a button with its shape in this run; the panel beside it shows its numbers.

let chosenPart = 'scores';
let phase = 'prefill';

/** The parts in the order of computation, with the columns and the rows of the grid that each takes. */
function blockParts() {
  const turn = model.positions === 'rotary' ? 1 : 0; // the rotation has a row of its own
  return [
    ['input', '2 / 5', '1'],
    ['norm1', '2 / 5', '2'],
    ['q', '2 / 3', '3'],
    ['k', '3 / 4', '3'],
    ['v', '4 / 5', '3'],
    ...(turn ? [['rotate', '2 / 4', '4']] : []),
    ['cache', '4 / 5', `4 / ${7 + turn}`],
    ['scores', '2 / 4', `${4 + turn}`],
    ['mask', '2 / 4', `${5 + turn}`],
    ['softmax', '2 / 4', `${6 + turn}`],
    ['weighted', '2 / 5', `${7 + turn}`],
    ['output', '2 / 5', `${8 + turn}`],
    ['add1', '2 / 5', `${9 + turn}`],
    ['norm2', '2 / 5', `${10 + turn}`],
    ['expand', '2 / 3', `${11 + turn}`],
    ['activation', '3 / 4', `${11 + turn}`],
    ['contract', '4 / 5', `${11 + turn}`],
    ['add2', '2 / 5', `${12 + turn}`],
  ];
}

/** The residual stream beside the parts: from the input to the first sum, and from there to the second. */
function residualLines(parts) {
  const row = (name) => Number(parts.find(([part]) => part === name)[2]);
  return [
    ['input', 'add1'],
    ['add1', 'add2'],
  ].map(([from, to]) => {
    const line = el(
      'div',
      { class: from === 'add1' ? 'residual second' : 'residual', 'aria-hidden': 'true' },
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
  // Prefill computes the scores of all its tokens, and a window masks some; decode has no others than the window's.
  const S = phase === 'prefill' ? T : Math.min(step.token, model.windows[state.layer] ?? Infinity);
  const { hidden_size: E, num_heads: H, num_key_value_heads: K, head_dim: D, intermediate_size: F } = model;
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

view('block', ['layer', 'head', 'token', 'step'], async (section) => {
  const panel = await partPanel(chosenPart);
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
    heading('block', { layers: model.num_layers, layer: state.layer }),
    choices(say('block.phase'), phases, phase, (value) => {
      phase = value;
      drawOne(views.find((item) => item.id === 'block'));
    }),
    el('p', { class: 'note' }, say('block.legend')),
    facts.residual === 'sequential'
      ? null
      : para(facts.residual === 'other' ? 'block.unusual' : 'block.parallel', {}, 'absent'),
    el('div', { class: 'block-wide' }, grid, el('div', { class: 'panel', 'aria-live': 'polite' }, panel)),
  );
  for (const list of section.querySelectorAll('.bars.tall')) {
    const own = list.children[state.token];
    list.scrollTop = own.offsetTop - list.offsetTop - list.clientHeight / 2;
  }
});

function partName(part) {
  return say(`part.${part}.name`, { norm: model.norm, activation: model.activation });
}
