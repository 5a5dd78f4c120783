// The feed-forward network: expand, activation, contract; which neurons a token makes active.

/** Curves by name; the forms of GELU differ by less than a line's width. */
const ACTIVATIONS = [
  [/^quick_gelu$/, (x) => x / (1 + Math.exp(-1.702 * x))],
  [/^gelu(_|$)/, (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)))],
  [/^(silu|swish)$/, (x) => x / (1 + Math.exp(-x))],
  [/^relu2$/, (x) => Math.max(0, x) ** 2],
  [/^relu$/, (x) => Math.max(0, x)],
  [/^tanh$/, Math.tanh],
];

const NUM_EXPANDED = 8; // neurons of which the block's panels show the numbers before the activation

view('ffn', ['layer', 'token'], async (section) => {
  const factor = mlpWidth() / model.hidden_size;
  const { mlp, mlp_input: mlpInput } = model.layers[state.layer];
  const values = {
    size: count(model.hidden_size),
    wide: count(mlpWidth()),
    factor: Number(factor.toFixed(2)),
    activation: model.activation,
    layer: state.layer,
    token: tokenText(state.token),
    position: state.token,
    share: percent(mlpShare()),
  };
  const intro = [
    heading('ffn', values),
    para(`ffn.${mlp}`, values),
    model.activation_is_seen || mlp === 'none' ? null : para('part.activation.unseen', {}, 'absent'),
  ];
  const drawing = el(
    'div',
    { class: 'widths', role: 'img', 'aria-label': say('ffn.widths', values) },
    ['contracted', 'expanded', 'expanded', 'contracted'].map((kind, i) => {
      const name = i || mlpInput === 'normed' ? `ffn.width.${i}` : 'ffn.width.0_as_is';
      const bar = el('div', { class: `width ${kind}` }, el('span', {}, say(name, values)));
      bar.style.width = `${kind === 'expanded' ? 100 : Math.min(100, 100 / factor)}%`;
      return bar;
    }),
  );
  if (!has('neuron_values')) {
    fill(section, intro, drawing, absence('mlp_activations'), curve());
    return;
  }
  const [half, profile] = await loadAll('neuron_half', 'neuron_profile');
  const cells = profile.row(state.layer, state.token);
  const halves = half.row(state.layer)[state.token];
  fill(
    section,
    intro,
    drawing,
    el(
      'div',
      { class: 'two' },
      el('div', {}, el('h3', {}, say('ffn.top', values)), tokenNote(values), await neuronList(12)),
      el(
        'div',
        {},
        el('h3', {}, say('ffn.all', values)),
        vector(say('ffn.profile'), cells, { of: cells.length, many: 0 }),
        para(
          'ffn.cells',
          { cells: cells.length, each: Number((mlpWidth() / cells.length).toFixed(1)), wide: values.wide },
          'note',
        ),
        para('ffn.half', { half: count(halves), wide: values.wide, share: percent(halves / mlpWidth()) }),
        curve(),
      ),
    ),
    el('h3', {}, say('ffn.choose')),
    tokenRow({ name: 'ffn-row', label: say('ffn.choose'), chosen: state.token, choose: (token) => change({ token }) }),
  );
});

function tokenNote(values) {
  return el('p', { class: 'where' }, say('ffn.where', values));
}

function mlpShare() {
  const size = (weight) => (weight.tied_to ? 0 : weight.shape.reduce((a, b) => a * b, 1));
  return (
    model.weights.filter((weight) => weight.part === 'mlp').reduce((total, weight) => total + size(weight), 0) /
    model.num_parameters
  );
}

/** The most active neurons; with `fromBefore` each note leads from what the activation is given to what is contracted. */
async function neuronList(many, fromBefore = false) {
  const [ids, found] = await loadAll('neuron_ids', 'neuron_values');
  const [names, values] = [ids.row(state.layer, state.token), found.row(state.layer, state.token)];
  const top = Math.abs(values[0]);
  const before = fromBefore ? (await load(activatedArray())).row(state.layer, state.token) : null;
  return bars(
    Array.from(names.slice(0, many), (id, i) => ({
      label: say('ffn.neuron', { id }),
      value: Math.abs(values[i]) / (top || 1),
      note: before ? `${num(before[i])} → ${num(values[i])}` : num(values[i]),
      kind: values[i] < 0 ? 'negative' : '',
    })),
    before ? 'wide-note' : '',
  );
}

/** What the activation is applied to. */
function activatedArray() {
  return has('neuron_gates') ? 'neuron_gates' : 'neuron_ups';
}

/** What the expanding matrices give for the most active neurons, before the activation. */
async function expandedTable() {
  const rowOf = (array) => array?.row(state.layer, state.token).slice(0, NUM_EXPANDED);
  const [ids, gates, ups] = (await loadAll('neuron_ids', 'neuron_gates', 'neuron_ups')).map(rowOf);
  const head = gates ? ['part.expand.gate', 'part.expand.up'] : ['part.expand.value'];
  return table(
    say('part.expand.table'),
    ['part.expand.neuron', ...head].map((key) => say(key)),
    Array.from(ids, (id, i) => [String(id), ...(gates ? [num(gates[i])] : []), num(ups[i])]),
    'before-table',
  );
}

/** The activation function from -4 to 4, where its name is one that this page knows. */
function curve() {
  const found = ACTIVATIONS.find(([pattern]) => pattern.test(model.activation));
  if (!found) return null;
  const canvas = el('canvas', { role: 'img', 'aria-label': say('ffn.curve', { activation: model.activation }) });
  const [width, height] = [260, 120];
  paint(canvas, width, height, (context) => {
    const at = (x, y) => [((x + 4) / 8) * width, height - 16 - ((y + 0.5) / 4.5) * (height - 16)];
    context.strokeStyle = palette.line;
    context.beginPath();
    context.moveTo(...at(-4, 0));
    context.lineTo(...at(4, 0));
    context.moveTo(...at(0, -0.5));
    context.lineTo(...at(0, 4));
    context.stroke();
    context.strokeStyle = palette.accent;
    context.lineWidth = 2;
    context.beginPath();
    for (let i = 0; i <= 160; i++) {
      const x = -4 + i / 20;
      context[i ? 'lineTo' : 'moveTo'](...at(x, Math.min(found[1](x), 4)));
    }
    context.stroke();
    context.fillStyle = palette.faint;
    context.font = palette.font;
    context.fillText('−4', 2, height - 4);
    context.fillText('0', width / 2 - 3, height - 4);
    context.fillText('4', width - 9, height - 4);
  });
  return el('figure', {}, canvas, el('figcaption', {}, say('ffn.curve', { activation: model.activation })));
}
