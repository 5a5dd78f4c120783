// Text to tokens, tokens to vectors, positions.

view('tokens', ['token'], (section) => {
  const bytesOf = (token) => token.bytes.match(/../g)?.join(' ') ?? '';
  const chosen = facts.tokens[state.token];
  const promptBytes = facts.tokens.slice(0, PROMPT_TOKENS).reduce((sum, token) => sum + token.bytes.length / 2, 0);
  fill(
    section,
    heading('tokens', { bytes: count(promptBytes), tokens: count(PROMPT_TOKENS), vocabulary: count(model.vocab_size) }),
    absence('tokens'),
    tokenRow({
      name: 'tokens-row',
      label: say('tokens.row'),
      chosen: state.token,
      choose: (token) => change({ token }),
      look: (i) => ({ note: `id ${facts.tokens[i].id}` }),
    }),
    el('p', { class: 'note' }, say('tokens.legend')),
    el(
      'dl',
      { class: 'facts' },
      fact(say('tokens.text'), el('code', {}, tokenText(state.token))),
      fact(say('tokens.position'), String(state.token)),
      fact(say('tokens.id'), String(chosen.id)),
      fact(say('tokens.bytes'), chosen.bytes ? el('code', {}, bytesOf(chosen)) : say('tokens.special')),
      fact(say('tokens.source'), say(state.token < PROMPT_TOKENS ? 'tokens.given' : 'tokens.generated')),
    ),
    el(
      'details',
      {},
      el('summary', {}, say('tokens.all')),
      table(
        say('tokens.all'),
        [say('tokens.position'), say('tokens.text'), say('tokens.id'), say('tokens.bytes')],
        facts.tokens.map((token, i) => [
          String(i),
          el('code', {}, tokenText(i)),
          String(token.id),
          el('code', {}, bytesOf(token) || '–'),
        ]),
      ),
    ),
  );
});

function fact(name, value) {
  return el('div', {}, el('dt', {}, name), el('dd', {}, value));
}

view('embeddings', ['token', 'layer'], async (section) => {
  const [embeddings, positions, rotary, hidden] = await loadAll('embeddings', 'positions', 'rotary', 'hidden');
  const E = model.hidden_size;
  const here = {
    token: tokenText(state.token),
    id: facts.tokens[state.token].id,
    position: state.token,
    size: count(E),
  };
  const own = embeddings.row(state.token);
  const maximum = Math.max(largest(own), positions ? largest(positions.row(state.token)) : 0);
  const { entry } = model;
  fill(
    section,
    heading('embeddings', { vocabulary: count(model.vocab_size), size: count(E), rows: shape(model.vocab_size, E) }),
    para('embeddings.row', here),
    entry.row_scale === 1
      ? null
      : para(entry.row_scale === null ? 'embeddings.row_other' : 'embeddings.row_scaled', {
          scale: num(entry.row_scale ?? 1, 4),
        }),
    vector(say('embeddings.token'), own, { of: E, maximum }),
    el('h3', {}, say('positions.title')),
    positionText(here, rotary),
    absence('position_embeddings', 'rotary_angles', 'embeddings', 'hidden'),
    positions && [
      vector(say('positions.vector', { position: state.token }), positions.row(state.token), { of: E, maximum }),
      entry.way === 'as_is' && el('p', { class: 'sum' }, '+ → ', say('positions.sum')),
    ],
    rotary && dials(rotary, angleSet()),
    entry.way === 'as_is' ? null : para(`entry.${entry.way}`, { scale: num(entry.scale, 4) }),
    (positions || entry.way !== 'as_is') && vector('x₀', hidden.row(0, state.token), { of: E }),
  );
});

/** What the model does about positions, and in which of its layers. */
function positionText(here, rotary) {
  const { positions, entry } = model;
  if (positions === 'learned') {
    const offset = entry.position_offset;
    return para(offset === null ? 'positions.learned_unknown' : 'positions.learned', {
      ...here,
      row: here.position + (offset ?? 0),
    });
  }
  if (positions !== 'rotary') return para(positions === 'alibi' ? 'positions.alibi' : 'positions.none');
  const still = [...model.layers.keys()].filter((i) => model.layers[i].attends && model.layers[i].rotates === false);
  const sizes = rotary && { pairs: rotary.shape[2], rotated: rotary.shape[2] * 2, dim: model.head_dim };
  return [
    para(rotary ? 'positions.rotary' : 'positions.rotary_unseen', { ...here, ...sizes }),
    still.length ? para('positions.rotary_not_all', { list: layerList(still) }) : null,
    model.layers.some((layer) => layer.rotates === null) ? para('positions.rotary_unknown') : null,
  ];
}

/** The angles of the chosen layer, or of the first that has some. */
function angleSet() {
  return model.layers[angleLayer()]?.angle_set ?? 0;
}

function angleLayer() {
  const first = model.layers.findIndex((layer) => layer.angle_set !== null);
  return model.layers[state.layer].angle_set === null ? Math.max(first, 0) : state.layer;
}

/** One dial for each rotated pair: where the pair that pointed right at position 0 points at the chosen position. */
function dials(rotary, set) {
  const angles = rotary.row(set, state.token);
  const next = NUM_TOKENS > 1 ? rotary.row(set, 1) : angles;
  const canvas = el('canvas', { role: 'img', class: 'dials' });
  const size = 34;
  const most = Math.max(1, Math.floor((byId('main').clientWidth - 50) / size));
  const down = Math.ceil(angles.length / most);
  const across = Math.ceil(angles.length / down);
  paint(canvas, across * size, down * size, (context) => {
    for (let i = 0; i < angles.length; i++) {
      const [x, y] = [(i % across) * size + size / 2, Math.floor(i / across) * size + size / 2];
      context.strokeStyle = palette.line;
      context.lineWidth = 1;
      context.beginPath();
      context.arc(x, y, size / 2 - 4, 0, 2 * Math.PI);
      context.moveTo(x, y);
      context.lineTo(x + size / 2 - 4, y);
      context.stroke();
      context.strokeStyle = palette.accent;
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + (size / 2 - 4) * Math.cos(angles[i]), y - (size / 2 - 4) * Math.sin(angles[i]));
      context.stroke();
    }
  });
  const degrees = (angle) => `${((angle * 180) / Math.PI).toFixed(2)}°`;
  const last = angles.length - 1;
  const said = say('positions.dials', {
    position: state.token,
    first: degrees(next[0]),
    last: degrees(next[last]),
    pairs: angles.length,
  });
  canvas.setAttribute('aria-label', said);
  const sets = rotary.shape[0] > 1 ? ` ${say('positions.rotary_sets', { layer: angleLayer() })}` : '';
  return el('figure', {}, canvas, el('figcaption', {}, said, sets));
}
