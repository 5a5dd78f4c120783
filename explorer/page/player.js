// Prefill and decode, played: the parts of the section are made once, and a frame changes only what moves.

const STEP_SECONDS = 1.6; // of one pass at speed 1
const SMALL_MODEL = 50e6; // parameters below which a pass is mostly overhead on any machine
const player = { playing: false, progress: 1, speed: 1, last: 0, frames: [], nodes: null };

view('inference', ['step'], (section) => {
  if (player.nodes?.language !== state.language) buildPlayer(section);
  showStep();
});

function buildPlayer(section) {
  const button = (name, act) =>
    el('button', { type: 'button', class: 'control', 'data-focus': name, onclick: act }, say(`player.${name}`));
  const nodes = {
    language: state.language,
    play: el('button', {
      type: 'button',
      class: 'control primary',
      'data-focus': 'play',
      onclick: () => (player.playing ? pause() : play()),
    }),
    slider: el('input', {
      type: 'range',
      min: '0',
      max: String(NUM_STEPS - 1),
      step: '1',
      'data-focus': 'step-slider',
      'aria-label': say('player.slider'),
    }),
    speed: el('input', {
      type: 'range',
      min: '-2',
      max: '3',
      step: '0.5',
      value: '0',
      'data-focus': 'speed',
      'aria-label': say('player.speed'),
    }),
    speedText: el('output', {}),
    status: el('p', { class: 'status', role: 'status', 'aria-live': 'polite' }),
    text: el('div', { class: 'token-row still', 'aria-hidden': 'true' }),
    cache: el('canvas', { role: 'img' }),
    without: el('canvas', { role: 'img' }),
    times: el('canvas', { role: 'img' }),
    table: el('div', {}),
  };
  nodes.slider.addEventListener('input', () => goTo(Number(nodes.slider.value)));
  nodes.speed.addEventListener('input', () => {
    player.speed = 2 ** Number(nodes.speed.value);
    nodes.speedText.textContent = `${num(player.speed, 2)} ×`;
  });
  nodes.speed.value = String(Math.log2(player.speed));
  nodes.speedText.textContent = `${num(player.speed, 2)} ×`;
  for (let i = 0; i < NUM_TOKENS; i++) {
    nodes.text.append(el('span', { class: 'token' }, tokenText(i)));
    if (facts.tokens[i].text.includes('\n')) nodes.text.append(el('span', { class: 'break' }));
  }
  player.nodes = nodes;
  fill(
    section,
    heading('inference', { prompt: PROMPT_TOKENS, decodes: NUM_STEPS - 1 }),
    el(
      'div',
      { class: 'two' },
      para('player.explain.prefill', { prompt: PROMPT_TOKENS }),
      para('player.explain.decode'),
    ),
    absence('cache', 'weight_bytes_read'),
    el(
      'div',
      { class: 'controls', role: 'group', 'aria-label': say('player.controls') },
      nodes.play,
      button('previous', () => goTo(state.step - 1)),
      button('next', () => goTo(state.step + 1)),
      el('label', { class: 'grow' }, say('player.step'), nodes.slider),
      el('label', {}, say('player.speed'), nodes.speed, nodes.speedText),
    ),
    nodes.status,
    nodes.text,
    el(
      'div',
      { class: 'two' },
      [
        ['with', nodes.cache],
        ['without', nodes.without],
      ]
        .slice(facts.has_cache ? 0 : 1)
        .map(([name, canvas]) =>
          el('figure', {}, el('h3', {}, say(`player.${name}`)), el('div', { class: 'canvas-box' }, canvas)),
        ),
    ),
    el('p', { class: 'note legend' }, playerLegend()),
    el('h3', {}, say('player.compare')),
    para('player.compare.text'),
    el('figure', {}, el('div', { class: 'canvas-box' }, nodes.times), el('figcaption', {}, timesLegend())),
    nodes.table,
    facts.has_cache ? growth() : null,
    para('player.measured', { machine: versionList() }, 'note'),
    model.num_parameters < SMALL_MODEL ? para('player.overhead', {}, 'note') : null,
  );
}

/** What one token adds to the cache. */
function growth() {
  const columns = facts.cache_bytes_per_token;
  const { num_layers: layers, num_key_value_heads: kvheads, head_dim: dim } = model;
  const each = columns[0] / (2 * kvheads * dim); // of one number; none where values are wider than keys
  const alike = [1, 2, 4, 8].includes(each) && columns.every((column) => column === columns[0]);
  const values = { bytes: count(sum(columns)), layers, kvheads, dim, each };
  return [
    alike ? para('player.growth', values, 'note') : para('player.growth.mixed', { bytes: values.bytes }, 'note'),
    model.layers.some((layer) => layer.window !== null) ? para('player.growth.window', {}, 'note') : null,
    model.layers.some((layer) => layer.chunk !== null) ? para('player.growth.chunk', {}, 'note') : null,
    KEEPING_LAYERS < layers
      ? para('player.growth.none', { list: layerList([...columns.keys()].filter((i) => !columns[i])) }, 'note')
      : null,
  ];
}

function playerLegend() {
  const item = (kind, key) => [el('span', { class: `swatch ${kind}` }), ` ${say(key)} `];
  return [
    say('player.axis'),
    ' ',
    item('cached', 'player.cached'),
    item('written', 'player.written'),
    item('again', 'player.again'),
    item('masked', HAS_LIMITS ? 'player.empty.window' : 'player.empty'),
  ];
}

function timesLegend() {
  return [
    el('span', { class: 'swatch written' }),
    ` ${say('player.with')} `,
    el('span', { class: 'swatch plain' }),
    ` ${say('player.without')}`,
  ];
}

/** Everything that changes from pass to pass, but for the moving picture. */
function showStep() {
  const { nodes } = player;
  const step = state.step;
  const [from, to] = queriesOf(step);
  const chosen = facts.steps[step].token;
  nodes.slider.value = String(step);
  const word = say(!facts.has_cache ? 'player.is.again' : step === 0 ? 'player.is.prefill' : 'player.is.decode', {
    step,
  });
  nodes.slider.setAttribute('aria-valuetext', word);
  nodes.play.textContent = say(player.playing ? 'player.pause' : 'player.play');
  const kind = !facts.has_cache ? 'again' : step === 0 ? 'prefill' : HAS_LIMITS ? 'decode.window' : 'decode';
  nodes.status.textContent = say(`player.status.${kind}`, {
    step,
    queries: to - from,
    read: facts.steps[step].num_keys - (to - from),
    token: chosen < NUM_TOKENS ? tokenText(chosen) : '?',
    given: tokenText(to - 1),
    held: bytes(facts.steps[step].cache_bytes),
    layers: model.num_layers,
    where: say(KEEPING_LAYERS < model.num_layers ? 'player.where_some' : 'player.where_all', {
      keeping: KEEPING_LAYERS,
      layers: model.num_layers,
    }),
  });
  const oldest = to - facts.steps[step].num_keys; // that the last query reads in the layer that sees most
  nodes.text.querySelectorAll('.token').forEach((token, i) => {
    const kind = i >= from && i < to ? 'asked' : i === chosen ? 'chosen' : i < from && i >= oldest ? 'in-cache' : 'later';
    token.className = `token ${kind}`;
  });
  nodes.cache.setAttribute('aria-label', say('player.grid', { step }));
  nodes.without.setAttribute('aria-label', say('player.grid.without', { queries: to, again: from }));
  nodes.times.setAttribute(
    'aria-label',
    say('player.times', {
      step,
      time: duration(facts.steps[step].duration_s),
      other: facts.uncached[step] ? duration(facts.uncached[step].duration_s) : '–',
    }),
  );
  drawTimes(nodes.times, step);
  fill(
    nodes.table,
    table(say('player.compare'), [word, say('player.with'), say('player.without')], comparison(step), 'numbers-table'),
  );
  drawGrids();
}

/** Without motion a pass is shown as it ends. */
function drawGrids() {
  const progress = CALM.matches ? 1 : Math.min(player.progress, 1);
  if (facts.has_cache) drawCache(player.nodes.cache, state.step, progress, true);
  drawCache(player.nodes.without, state.step, progress, false);
}

function goTo(step) {
  pause();
  player.progress = 1;
  change({ step: Math.min(Math.max(step, 0), NUM_STEPS - 1) });
  showStep();
}

function play() {
  if (state.step === NUM_STEPS - 1 && player.progress >= 1) change({ step: 0 });
  player.progress = 0;
  player.playing = true;
  player.last = performance.now();
  player.frames = [];
  showStep();
  requestAnimationFrame(frame);
}

function pause() {
  if (!player.playing) return;
  player.playing = false;
  player.nodes.play.textContent = say('player.play');
}

/** One frame; without motion a pass stands still until the next. */
function frame(now) {
  if (!player.playing) return;
  player.frames.push(now);
  player.progress += ((now - player.last) / 1000 / STEP_SECONDS) * player.speed;
  player.last = now;
  if (player.progress >= 1.15) {
    // a moment's rest on the finished pass
    if (state.step === NUM_STEPS - 1) {
      player.progress = 1;
      pause();
      drawGrids();
      return;
    }
    player.progress = 0;
    change({ step: state.step + 1 });
  } else if (!CALM.matches) {
    drawGrids();
  }
  requestAnimationFrame(frame);
}
