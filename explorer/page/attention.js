// Attention of every layer and head as small pictures; one of them large, with the text beneath.

/** One head as a canvas of one pixel per (query, key); what the causal mask hides has the mask's own colour. */
function headPicture(attentions, layer, head) {
  const weights = attentions.row(layer, head);
  return pixels(NUM_TOKENS, NUM_TOKENS, (i) => {
    const [query, key] = [Math.floor(i / NUM_TOKENS), i % NUM_TOKENS];
    return sees(layer, query, key) ? heatColour(weights[i]) : palette.rgb.mask;
  });
}

const SMALL_PIXELS = 96; // of a small picture's side; longer texts show the strongest of neighbouring weights

function smallPicture(attentions, layer, head) {
  const each = Math.ceil(NUM_TOKENS / SMALL_PIXELS);
  if (each === 1) return headPicture(attentions, layer, head);
  const side = Math.ceil(NUM_TOKENS / each);
  const weights = attentions.row(layer, head);
  const strongest = new Float32Array(side * side).fill(-1);
  for (let query = 0; query < NUM_TOKENS; query++) {
    for (let key = 0; key <= query; key++) {
      const cell = Math.floor(query / each) * side + Math.floor(key / each);
      if (sees(layer, query, key)) strongest[cell] = Math.max(strongest[cell], weights[query * NUM_TOKENS + key]);
    }
  }
  return pixels(side, side, (i) => (strongest[i] < 0 ? palette.rgb.mask : heatColour(strongest[i])));
}

let pictures = null; // of the present theme

view('attention', ['layer', 'head', 'token'], async (section) => {
  const intro = [
    heading('attention', {
      layers: ATTENDING_LAYERS,
      heads: model.num_heads,
      all: ATTENDING_LAYERS * model.num_heads,
    }),
  ];
  if (!has('attentions')) {
    fill(section, intro, absence('attentions'));
    return;
  }
  const attentions = await load('attentions');
  const key = `${state.theme}-${state.language}`;
  if (pictures?.key !== key) pictures = { key, node: smallMultiples(attentions) };
  markChosen(pictures.node);
  const { large, text } = largeHead(attentions);
  fill(
    section,
    intro,
    absence('attentions'),
    model.num_key_value_heads < model.num_heads
      ? para('attention.grouped', { heads: model.num_heads, kvheads: model.num_key_value_heads, group: HEADS_PER_KEY })
      : null,
    limitText('window', 'attention.windows'),
    limitText('chunk', 'attention.chunks'),
    el(
      'div',
      { class: 'attention-wide' },
      el(
        'div',
        {},
        el('h3', {}, say('attention.all')),
        pictures.node,
        legend(),
        el('p', { class: 'note' }, say('attention.hover')),
        text,
      ),
      large,
    ),
  );
});

function limitText(field, key) {
  if (!model.layers.some((layer) => layer[field] !== null)) return null;
  return para(key, { list: model.layers.map((layer, i) => `${i}: ${layer[field] ?? '∞'}`).join(', ') });
}

function legend() {
  const swatch = (kind) => el('span', { class: `swatch ${kind}` });
  return el(
    'p',
    { class: 'note legend' },
    swatch('ramp'),
    ` ${say('attention.ramp')} `,
    swatch('masked'),
    ` ${say(HAS_LIMITS ? 'attention.masked.window' : 'attention.masked')}`,
  );
}

/** Buttons in a grid, a row per layer; arrow keys move through them, one of them is in the order of Tab. */
function smallMultiples(attentions) {
  const grid = el('div', { class: 'heads', role: 'group', 'aria-label': say('attention.grid') });
  grid.style.setProperty('--heads', model.num_heads);
  for (let layer = 0; layer < model.num_layers; layer++) {
    grid.append(el('span', { class: 'heads-label', 'aria-hidden': 'true' }, String(layer)));
    for (let head = 0; head < model.num_heads; head++) {
      const name = say('attention.one', { layer, head });
      grid.append(
        el(
          'button',
          {
            type: 'button',
            class: 'head',
            'aria-label': name,
            title: name,
            'data-layer': String(layer),
            'data-head': String(head),
          },
          smallPicture(attentions, layer, head),
        ),
      );
    }
  }
  grid.addEventListener('click', (event) => {
    const button = event.target.closest('.head');
    if (button) change({ layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
  });
  grid.addEventListener('keydown', (event) => {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[
      event.key
    ] ?? [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    change({
      layer: Math.min(Math.max(state.layer + down, 0), model.num_layers - 1),
      head: Math.min(Math.max(state.head + right, 0), model.num_heads - 1),
    });
  });
  return grid;
}

function markChosen(grid) {
  for (const button of grid.querySelectorAll('.head')) {
    const chosen = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
    button.setAttribute('aria-pressed', String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    if (chosen) button.dataset.focus = 'head';
    else delete button.dataset.focus;
  }
}

/** The chosen head: picture with crosshair, the text shaded by where the chosen token looks, and the top of the list. */
function largeHead(attentions) {
  const weights = (query) => attentions.row(state.layer, state.head, query);
  const picture = headPicture(attentions, state.layer, state.head);
  const summary = say('attention.summary', { layer: state.layer, head: state.head, ...topOf(weights(state.token)) });
  picture.setAttribute('role', 'img');
  picture.setAttribute('aria-label', summary);
  const crossRow = el('div', { class: 'cross-row' });
  const crossCell = el('div', { class: 'cross-cell' });
  const frame = el('div', { class: 'large-head' }, picture, crossRow, crossCell);
  const readout = el('p', { class: 'numbers readout' });
  const list = el('div', {});
  const text = tokenRow({
    name: 'attention-row',
    label: say('attention.row'),
    chosen: state.token,
    choose: (token) => change({ token }),
    peek: (token) => show(token),
    leave: () => show(state.token),
  });
  const share = 100 / NUM_TOKENS;
  function show(query, key = null) {
    const row = weights(query);
    const top = largest(row);
    crossRow.style.top = `${query * share}%`;
    crossRow.style.height = `${share}%`;
    crossCell.hidden = key === null;
    if (key !== null) {
      crossCell.style.left = `${key * share}%`;
      crossCell.style.top = `${query * share}%`;
      crossCell.style.width = `${share}%`;
      crossCell.style.height = `${share}%`;
    }
    for (const token of text.querySelectorAll('.token')) {
      const j = Number(token.dataset.index);
      const seen = sees(state.layer, query, j);
      tint(token, seen ? heatColour(row[j]) : null);
      token.classList.toggle('unseen', !seen);
      token.classList.toggle('looking', j === query);
    }
    readout.textContent =
      key === null
        ? say('attention.looks', { token: tokenText(query), position: query })
        : sees(state.layer, query, key)
          ? say('attention.cell', {
              token: tokenText(query),
              key: tokenText(key),
              share: percent(row[key]),
              position: query,
              at: key,
            })
          : say('attention.cell.masked', { token: tokenText(query), key: tokenText(key), position: query, at: key });
    const order = [...row.keys()]
      .filter((j) => sees(state.layer, query, j))
      .sort((a, b) => row[b] - row[a])
      .slice(0, 6);
    fill(
      list,
      bars(order.map((j) => ({ label: `${j} ${clip(tokenText(j), 14)}`, value: row[j] / top, note: percent(row[j]) }))),
    );
  }
  frame.addEventListener('pointermove', (event) => {
    const box = frame.getBoundingClientRect();
    const at = (offset, size) => Math.min(Math.max(Math.floor((offset / size) * NUM_TOKENS), 0), NUM_TOKENS - 1);
    show(at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width));
  });
  frame.addEventListener('pointerleave', () => show(state.token));
  frame.addEventListener('click', (event) => {
    const box = frame.getBoundingClientRect();
    change({ token: Math.min(Math.floor(((event.clientY - box.top) / box.height) * NUM_TOKENS), NUM_TOKENS - 1) });
  });
  show(state.token);
  const large = el(
    'div',
    { class: 'one-head' },
    el('h3', {}, say('attention.one', { layer: state.layer, head: state.head })),
    el('div', { class: 'axis' }, say('attention.axis')),
    frame,
    readout,
    list,
  );
  return { large, text };
}

function topOf(row) {
  const best = row.indexOf(Math.max(...row));
  return { token: tokenText(state.token), best: tokenText(best), share: percent(row[best]) };
}
