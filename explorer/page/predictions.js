// What the model thinks comes next: after each block, at the end with sampling, and how well it did on the text.

view('lens', ['token', 'layer'], (section) => {
  const { ids, probabilities } = facts.lens;
  const next = state.token + 1 < NUM_TOKENS ? facts.tokens[state.token + 1] : null;
  const rows = ids.map((layer, i) => [
    el(
      'button',
      { type: 'button', class: 'quiet', 'data-focus': `lens-${i}`, onclick: () => change({ layer: i }) },
      String(i),
    ),
    ...layer[state.token].map((id, rank) => {
      const probability = probabilities[i][state.token][rank];
      const cell = el(
        'span',
        { class: next?.id === id ? 'lens-cell hit' : 'lens-cell' },
        el('code', {}, clip(idText(id), 12)),
        ' ',
        el('small', {}, percent(probability)),
      );
      tint(cell, heatColour(probability * 0.7));
      return cell;
    }),
  ]);
  fill(
    section,
    heading('lens', {
      layers: model.num_layers,
      norm: model.exit.norm ? say('lens.norm', { norm: model.exit.norm.label }) : '',
    }),
    model.exit.way === 'as_is' ? null : para(`exit.${model.exit.way}`, { value: num(model.exit.value, 4) }),
    absence('lens_ids', 'lens_probabilities'),
    tokenRow({ name: 'lens-row', label: say('lens.row'), chosen: state.token, choose: (token) => change({ token }) }),
    para('lens.at', { token: tokenText(state.token), position: state.token, next: next ? visible(next.text) : '–' }),
    table(say('lens.table'), [say('lens.layer'), '1', '2', '3', '4', '5'], rows.reverse(), 'lens-table'),
    el('p', { class: 'note' }, say('lens.legend')),
  );
});

// ---- Sampling ----

const settings = {
  temperature: facts.sampling?.temperature ?? 1,
  topK: facts.sampling?.top_k ?? model.vocab_size,
  topP: facts.sampling?.top_p ?? 1,
};

/**
 * The next token's distribution after a pass, as the warpers of transformers make it: temperature, then top-k, then top-p.
 * @param {Float32Array} logits All V, descending.
 * @returns {{probabilities: Float64Array, kept: number}} Descending, over all V; the first `kept` are not zero.
 */
function distribution(logits, { temperature, topK, topP }) {
  const V = logits.length;
  const probabilities = new Float64Array(V);
  let kept = Math.min(topK, V);
  while (kept < V && logits[kept] === logits[kept - 1]) kept += 1; // ties with the last stay, too
  let total = 0;
  for (let i = 0; i < kept; i++) total += probabilities[i] = Math.exp((logits[i] - logits[0]) / temperature);
  if (topP < 1) {
    let before = 0;
    let nucleus = 0;
    while (nucleus < kept && (nucleus === 0 || before / total < topP)) before += probabilities[nucleus++];
    probabilities.fill(0, nucleus, kept);
    [kept, total] = [nucleus, before];
  }
  for (let i = 0; i < kept; i++) probabilities[i] /= total;
  return { probabilities, kept };
}

/** All V logits after a pass, descending: the likeliest as the model gave them, the rest rounded. */
async function sortedLogits(step) {
  const [exact, tail] = await loadAll('logits', 'logits_tail');
  const result = new Float32Array(model.vocab_size);
  const first = exact.row(step);
  result.set(first);
  if (tail) result.set(tail.row(step), first.length);
  return result.subarray(0, first.length + (tail ? tail.shape[1] : 0));
}

const sampler = { language: null, nodes: null };

view('sampling', ['step'], async (section) => {
  await loadAll('logits', 'logits_tail');
  if (sampler.language !== state.language) buildSampler(section);
  await showSampler();
});

/** A slider that stays where it is while its section changes. `toValue` turns its position into the setting. */
function slider(name, range, position, show) {
  const output = el('output', {});
  const input = el('input', {
    type: 'range',
    ...range,
    value: String(position()),
    'data-focus': `slider-${name}`,
    id: `slider-${name}`,
  });
  const refresh = () => {
    output.textContent = show();
    input.setAttribute('aria-valuetext', show());
  };
  return {
    label: el('label', { class: 'grow' }, say(`sampling.${name}`), input, output),
    input,
    output,
    refresh,
    position,
  };
}

function buildSampler(section) {
  const V = model.vocab_size;
  const toK = (position) => (position >= 100 ? V : Math.max(1, Math.round(V ** (position / 100))));
  const sliders = {
    temperature: slider(
      'temperature',
      { min: '0.05', max: '2', step: '0.05' },
      () => settings.temperature,
      () => settings.temperature.toFixed(2),
    ),
    topK: slider(
      'topK',
      { min: '0', max: '100', step: '1' },
      () => (100 * Math.log(settings.topK)) / Math.log(V),
      () => (settings.topK >= V ? say('sampling.everything', { all: count(V) }) : count(settings.topK)),
    ),
    topP: slider(
      'topP',
      { min: '0.01', max: '1', step: '0.01' },
      () => settings.topP,
      () => settings.topP.toFixed(2),
    ),
  };
  const read = { temperature: Number, topK: (text) => toK(Number(text)), topP: Number };
  for (const [name, item] of Object.entries(sliders)) {
    item.input.addEventListener('input', () => {
      settings[name] = read[name](item.input.value);
      showSampler();
    });
  }
  const nodes = {
    sliders,
    step: el('div', {}),
    summary: el('p', { class: 'status', role: 'status', 'aria-live': 'polite' }),
    list: el('div', {}),
    drawn: el('span', { class: 'drawn' }),
  };
  const reset = () => {
    Object.assign(settings, { temperature: 1, topK: V, topP: 1 });
    for (const item of Object.values(sliders)) item.input.value = String(item.position());
    showSampler();
  };
  Object.assign(sampler, { language: state.language, nodes });
  fill(
    section,
    heading('sampling', { vocabulary: count(V) }),
    absence('logits'),
    facts.sampling
      ? para('sampling.drawn', {
          temperature: facts.sampling.temperature,
          topK: facts.sampling.top_k ?? say('sampling.none'),
          topP: facts.sampling.top_p,
          seed: facts.sampling.seed,
        })
      : para('sampling.greedy'),
    nodes.step,
    el(
      'div',
      { class: 'controls' },
      Object.values(sliders).map((item) => item.label),
    ),
    el(
      'div',
      { class: 'controls' },
      el('button', { type: 'button', class: 'control', 'data-focus': 'reset', onclick: reset }, say('sampling.reset')),
      el(
        'button',
        { type: 'button', class: 'control', 'data-focus': 'draw', onclick: drawToken },
        say('sampling.draw'),
      ),
      nodes.drawn,
    ),
    nodes.summary,
    nodes.list,
    para(
      'sampling.exact',
      { exact: count(Math.min(facts.arrays.logits.shape[1], V)), vocabulary: count(V), steps: TAIL_STEPS },
      'note',
    ),
  );
}

async function showSampler() {
  const { nodes } = sampler;
  const logits = await sortedLogits(state.step);
  const ids = facts.candidates[state.step];
  const after = distribution(logits, settings);
  const plain = distribution(logits, { temperature: 1, topK: logits.length, topP: 1 }).probabilities;
  for (const item of Object.values(nodes.sliders)) item.refresh();
  const position = PROMPT_TOKENS - 1 + state.step;
  const select = el(
    'select',
    {
      'data-focus': 'sampling-step',
      'aria-label': say('sampling.step'),
      onchange: (event) => change({ step: Number(event.target.value) }),
    },
    facts.steps.map((_, i) =>
      el(
        'option',
        { value: String(i), selected: i === state.step },
        `${i}: … ${clip(tokenText(PROMPT_TOKENS - 1 + i), 20)} → ?`,
      ),
    ),
  );
  const focused = document.activeElement?.dataset?.focus === 'sampling-step';
  fill(
    nodes.step,
    el('label', {}, say('sampling.step'), select),
    ' ',
    rich('sampling.context', { text: [el('bdi', {}, clip(contextBefore(position), 60))] }),
  );
  if (focused) select.focus({ preventScroll: true });
  const chosen = facts.tokens[position + 1]?.id;
  const top = Math.max(after.probabilities[0], plain[0]);
  const entropy = -after.probabilities
    .slice(0, after.kept)
    .reduce((total, p) => total + (p > 0 ? p * Math.log2(p) : 0), 0);
  nodes.summary.textContent = say('sampling.summary', {
    kept: count(after.kept),
    all: count(logits.length),
    entropy: entropy.toFixed(2),
  });
  fill(
    nodes.list,
    bars(
      ids.slice(0, 20).map((id, i) => ({
        label: `${clip(idText(id), 16)}${id === chosen ? ' ◂' : ''}`,
        value: after.probabilities[i] / top,
        note: `${percent(after.probabilities[i])} · ${num(logits[i])}`,
        kind: i >= after.kept ? 'hidden' : '',
      })),
      'wide-note',
    ),
    el(
      'p',
      { class: 'note' },
      say('sampling.rest', {
        share: percent(
          Math.max(0, 1 - after.probabilities.slice(0, Math.min(20, ids.length)).reduce((a, b) => a + b, 0)),
        ),
      }),
    ),
  );
}

function contextBefore(position) {
  const first = Math.max(0, position - 11);
  const text = spelt(first, position + 1).map((piece) => piece.special ?? piece);
  return (first ? '…' : '') + text.join('').replaceAll('\n', '⏎');
}

async function drawToken() {
  const { probabilities, kept } = distribution(await sortedLogits(state.step), settings);
  let rest = Math.random();
  let rank = 0;
  while (rank < kept - 1 && (rest -= probabilities[rank]) > 0) rank += 1;
  const id = facts.candidates[state.step][rank];
  sampler.nodes.drawn.textContent =
    id === undefined
      ? say('sampling.unnamed', { rank: count(rank + 1) })
      : `${idText(id)} (${percent(probabilities[rank])})`;
}

// ---- Loss ----

view('loss', ['token'], (section) => {
  const { losses } = facts;
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const prompt = losses.slice(0, PROMPT_TOKENS - 1);
  const top = Math.max(...losses, 1e-9);
  const order = [...losses.keys()].sort((a, b) => losses[b] - losses[a]).slice(0, 8);
  const own = state.token > 0 ? losses[state.token - 1] : null;
  const uniform = Math.log(model.vocab_size);
  fill(
    section,
    heading('loss', { uniform: uniform.toFixed(2), vocabulary: count(model.vocab_size) }),
    tokenRow({
      name: 'loss-row',
      label: say('loss.row'),
      chosen: state.token,
      choose: (token) => change({ token }),
      look: (i) =>
        i === 0
          ? { note: say('loss.first') }
          : {
              colour: between('panel', 'minus', losses[i - 1] / top),
              note: `${losses[i - 1].toFixed(3)} nats`,
            },
    }),
    el(
      'p',
      { class: 'note legend' },
      el('span', { class: 'swatch loss-ramp' }),
      ` ${say('loss.legend', { top: top.toFixed(2) })}`,
    ),
    el(
      'p',
      { class: 'numbers readout' },
      own === null
        ? say('loss.first')
        : say('loss.one', {
            token: tokenText(state.token),
            position: state.token,
            loss: own.toFixed(3),
            probability: percent(Math.exp(-own)),
          }),
    ),
    el(
      'dl',
      { class: 'facts' },
      prompt.length ? fact(say('loss.mean'), `${mean(prompt).toFixed(3)} nats`) : null,
      prompt.length ? fact(say('loss.perplexity'), Math.exp(mean(prompt)).toFixed(2)) : null,
      fact(say('loss.bits'), facts.bits_per_byte === null ? say('loss.nobits') : facts.bits_per_byte.toFixed(3)),
      losses.length > prompt.length
        ? fact(say('loss.generated'), `${mean(losses.slice(PROMPT_TOKENS - 1)).toFixed(3)} nats`)
        : null,
      fact(say('loss.uniform'), `${uniform.toFixed(3)} nats`),
    ),
    el('h3', {}, say('loss.hard')),
    bars(
      order.map((i) => ({
        label: `${i + 1} ${clip(tokenText(i + 1), 14)}`,
        value: losses[i] / top,
        note: `${losses[i].toFixed(2)} · p ${percent(Math.exp(-losses[i]))}`,
      })),
      'wide-note loss',
    ),
  );
});
