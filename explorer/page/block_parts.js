// The numbers behind each part of the block, for the chosen layer, head and token.

/** Names of the weights that compute a part; families name them differently, so the pattern has each. */
const PART_WEIGHTS = {
  norm1: /(input_layernorm|ln_1|norm_1|ln1|attention_norm|attn_norm|self_attn_layer_norm)\./,
  q: /(q_proj|q_norm|c_attn|query_key_value|qkv|Wqkv|\.query)/,
  k: /(k_proj|k_norm|c_attn|query_key_value|qkv|Wqkv|\.key\.)/,
  v: /(v_proj|c_attn|query_key_value|qkv|Wqkv|\.value)/,
  output: /(o_proj|out_proj|attn\.c_proj|attention\.dense|self_attention\.dense|attention\.output)/,
  norm2: /(post_attention_layernorm|ln_2|norm_2|ln2|ffn_norm|mlp_norm|final_layer_norm)\./,
  expand: /(gate_proj|up_proj|c_fc|fc1|fc_in|h_to_4h|gate_up)/,
  contract: /(down_proj|mlp\.c_proj|fc2|fc_out|4h_to_h)/,
};

function weightsOf(part) {
  const pattern = PART_WEIGHTS[part];
  if (!pattern) return null;
  const found = model.weights.filter((weight) => weight.layer === state.layer && pattern.test(weight.name));
  if (!found.length) return null;
  return el(
    'ul',
    { class: 'weights-used' },
    found.map((weight) =>
      el(
        'li',
        {},
        el('code', {}, weight.name),
        ` ${shape(...weight.shape)} · ${count(weight.shape.reduce((a, b) => a * b, 1))}`,
      ),
    ),
  );
}

async function partPanel(part) {
  const D = model.head_dim;
  const values = {
    layer: state.layer,
    head: state.head,
    token: tokenText(state.token),
    position: state.token,
    activation: model.activation,
    mixer: model.layers[state.layer].mixer,
    group: HEADS_PER_KEY,
    kvhead: keyHead(),
    heads: model.num_heads,
    kvheads: model.num_key_value_heads,
    dim: D,
    size: count(model.hidden_size),
    wide: count(mlpWidth()),
    factor: Number((mlpWidth() / model.hidden_size).toFixed(2)),
  };
  const numbers = await PART_NUMBERS[part](values);
  return [
    el('h3', {}, partName(part)),
    partText(part, values),
    el('p', { class: 'where' }, say('part.where', values)),
    numbers,
    weightsOf(part) && [el('h4', {}, say('part.weights')), weightsOf(part)],
  ];
}

function mlpWidth() {
  return model.layers[state.layer].mlp_width;
}

/** The sentences of a part: only what is so in the chosen layer. */
function partText(part, values) {
  const layer = model.layers[state.layer];
  const texts = {
    norm1: () => normText('part.norm1.text', layer.attention_input, layer.norm_before_attention),
    norm2: () => normText(secondNorm(layer), layer.mlp_input, layer.norm_before_mlp),
    q: () => [para('part.q.text', values), innerNorms(layer)],
    k: () => [para('part.k.text', values), cachedText(), innerNorms(layer)],
    v: () => [para('part.v.text', values), cachedText()],
    rotate: () => (layer.rotates ? para('part.rotate.text') : null),
    cache: () => [para('part.cache.text'), isLimited(layer) ? para('part.cache.limit') : null],
    scores: () => [
      layer.attention_scale === null
        ? para('part.scores.unscaled')
        : para('part.scores.text', { scale: num(layer.attention_scale) }),
      layer.softcap === null ? null : para('part.scores.softcap', { cap: num(layer.softcap) }),
      model.positions === 'alibi' ? para('part.scores.alibi') : null,
    ],
    mask: () => [
      para('part.mask.text'),
      layer.window === null ? null : para('part.mask.window', { window: count(layer.window) }),
      layer.chunk === null ? null : para('part.mask.chunk', { chunk: count(layer.chunk) }),
    ],
    softmax: () => para(layer.has_sink ? 'part.softmax.sink' : 'part.softmax.text'),
    output: () => [para('part.output.text', values), afterText(layer, layer.norm_after_attention)],
    expand: () => para(layer.mlp === 'experts' ? 'part.expand.experts' : 'part.expand.text', values),
    activation: () => [
      para('part.activation.text'),
      model.activation_is_seen ? null : para('part.activation.unseen', {}, 'absent'),
    ],
    contract: () => [para('part.contract.text', values), afterText(layer, layer.norm_after_mlp)],
  };
  return texts[part]?.() ?? (part === 'rotate' ? null : para(`part.${part}.text`, values));
}

function isLimited(layer) {
  return layer.window !== null || layer.chunk !== null;
}

function normText(key, input, norm) {
  if (norm) return para(key);
  return para(input === 'as_is' ? 'part.norm.absent' : 'part.norm.unknown', {}, 'absent');
}

/** What the norm before the FFN is, by where the FFN stands. */
function secondNorm(layer) {
  if (layer.order !== 'parallel') return 'part.norm2.text';
  return layer.norm_before_mlp?.module === layer.norm_before_attention?.module ? 'part.norm2.shared' : 'part.norm2.own';
}

function innerNorms(layer) {
  return layer.inner_norms.length ? para('part.norm.inner', { names: layer.inner_norms.join(', ') }) : null;
}

function cachedText() {
  return facts.cache_bytes_per_token[state.layer] > 0 ? para('part.cached') : null;
}

/** What happens to a result on its way to the stream. */
function afterText(layer, norm) {
  return [
    norm ? para('part.norm.after', { module: norm.module }) : null,
    layer.added_scale === 1 ? null : para('part.scale', { scale: num(layer.added_scale) }),
  ];
}

function keyHead() {
  return Math.floor(state.head / HEADS_PER_KEY);
}

async function streamVector(array, name, ...indices) {
  if (!has(array)) return absence(array);
  const [data, stats] = await loadAll(array, `${array.replace(/s$/, '')}_stats`);
  const [mean, deviation, rms] = stats.row(...indices);
  return [
    vector(name, data.row(...indices), { of: model.hidden_size }),
    el('p', { class: 'note' }, say('vector.stats', { mean: num(mean), deviation: num(deviation), rms: num(rms) })),
  ];
}

/** A vector before and after a norm, without what is learned in it; and what that is. */
function normed(before, [mean, deviation, rms], norm) {
  const [isCentred, isRms] = [norm.label === 'LayerNorm', norm.label === 'RMSNorm'];
  const isKnown = norm.scale !== 'unknown' && (isCentred || isRms);
  const after = Float32Array.from(before, (value) => (isCentred ? (value - mean) / deviation : value / rms));
  const learned = `${norm.scale === 'none' ? 'plain' : norm.scale}${norm.shift ? '_shift' : ''}`;
  return [
    vector(say('part.before'), before, { of: model.hidden_size }),
    el('p', { class: 'note' }, say('vector.stats', { mean: num(mean), deviation: num(deviation), rms: num(rms) })),
    isKnown ? vector(say('part.normed'), after, { of: model.hidden_size }) : null,
    isKnown
      ? el('p', { class: 'note' }, say(isCentred ? 'part.norm.centred' : 'part.norm.rms'), ' ', say(`part.norm.${learned}`))
      : para('part.norm.other', { class: norm.label }, 'note'),
  ];
}

async function headVector(array, name, kind, head) {
  if (!has(array)) return absence(array);
  const data = await load(array);
  return vector(name, data.row(state.layer, head, state.token), { kind, many: 8 });
}

/** The token's scores against every key, those that the mask hides too: q·k times the scale. */
async function scoresOf(layer, head, token) {
  const scale = model.layers[layer].attention_scale;
  if (!has('queries') || !has('keys') || scale === null) return null;
  const [queries, keys] = await loadAll('queries', 'keys');
  const q = queries.row(layer, head, token);
  return Float32Array.from({ length: NUM_TOKENS }, (_, j) => {
    const k = keys.row(layer, Math.floor(head / HEADS_PER_KEY), j);
    let sum = 0;
    for (let i = 0; i < q.length; i++) sum += q[i] * k[i];
    return sum * scale;
  });
}

/** Whether the causal mask (and the layer's window or chunk) lets a query see a key. */
function sees(layer, query, key) {
  const { window, chunk } = model.layers[layer];
  if (chunk !== null && Math.floor(query / chunk) !== Math.floor(key / chunk)) return false;
  return key <= query && (window === null || query - key < window);
}

function scoreList(scores, masked) {
  const part = masked ? 'mask' : 'scores';
  const finite = [...scores].filter((value, j) => !masked || sees(state.layer, state.token, j));
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  return bars(
    Array.from(scores, (score, j) => {
      const hidden = !sees(state.layer, state.token, j);
      return {
        label: `${j} ${clip(tokenText(j), 12)}${j === state.token ? ' ◂' : ''}`,
        value: masked && hidden ? 0 : (score - low) / (high - low || 1),
        note: masked && hidden ? '−∞' : num(score),
        kind: hidden ? 'hidden' : '',
      };
    }),
    'tall',
    partName(masked ? 'mask' : 'scores'),
  );
}

async function scorePanel(masked) {
  const scores = await scoresOf(state.layer, state.head, state.token);
  if (!scores) return absence('queries', 'keys') ?? para('part.scores.unknown', {}, 'absent');
  const error = facts.score_error;
  return [
    el(
      'p',
      { class: 'note' },
      error === null ? '' : say(error > 0.05 ? 'part.scores.more' : 'part.scores.error', { error: num(error, 2) }),
    ),
    scoreList(scores, masked),
  ];
}

async function attentionRow() {
  return (await load('attentions')).row(state.layer, state.head, state.token);
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

const PART_NUMBERS = {
  input: () => streamVector('hidden', 'x', state.layer, state.token),
  norm1: async () => {
    const norm = model.layers[state.layer].norm_before_attention;
    if (!norm) return null;
    const [hidden, stats] = await loadAll('hidden', 'hidden_stats');
    return normed(hidden.row(state.layer, state.token), stats.row(state.layer, state.token), norm);
  },
  q: () => headVector('queries', 'q', 'query', state.head),
  k: () => headVector('keys', 'k', 'key', keyHead()),
  v: () => headVector('values', 'v', 'value', keyHead()),
  rotate: async () => {
    const { rotates, angle_set: set } = model.layers[state.layer];
    if (!rotates) {
      return para(rotates === null ? 'part.rotate.unknown' : 'part.rotate.none', { layer: state.layer }, 'absent');
    }
    if (!has('rotary')) return absence('rotary_angles');
    if (set === null) return para('part.rotate.unrecorded', {}, 'absent');
    const angles = (await load('rotary')).row(set, state.token);
    const list = Array.from(angles.slice(0, 6), (angle) => `${((angle * 180) / Math.PI).toFixed(1)}°`).join(', ');
    return el('p', { class: 'numbers' }, say('part.rotate.angles', { list, position: state.token }));
  },
  cache: async () => {
    if (!facts.has_cache) return absence('cache');
    const step = facts.steps[state.step];
    return [
      el(
        'p',
        { class: 'numbers' },
        say('part.cache.bytes', {
          layer: bytes(step.cache_bytes_per_layer[state.layer]),
          all: bytes(step.cache_bytes),
          column: bytes(sum(facts.cache_bytes_per_token)),
          exact: count(step.cache_bytes),
        }),
      ),
      await headVector('keys', 'k', 'key', keyHead()),
      await headVector('values', 'v', 'value', keyHead()),
    ];
  },
  scores: () => scorePanel(false),
  mask: () => scorePanel(true),
  softmax: async () => {
    if (!has('attentions')) return absence('attentions');
    const row = await attentionRow();
    const top = largest(row);
    return [
      bars(
        Array.from(row, (weight, j) => ({
          label: `${j} ${clip(tokenText(j), 12)}${j === state.token ? ' ◂' : ''}`,
          value: weight / top,
          note: sees(state.layer, state.token, j) ? percent(weight) : '0',
          kind: sees(state.layer, state.token, j) ? '' : 'hidden',
        })),
        'tall',
        partName('softmax'),
      ),
      el('p', { class: 'numbers' }, say('part.softmax.sum', { sum: sum(row).toFixed(4) })),
    ];
  },
  weighted: async () => {
    if (!has('attentions') || !has('values')) return absence('attentions', 'values');
    const [row, values] = [await attentionRow(), await load('values')];
    const width = values.shape[3];
    const result = new Float32Array(width);
    for (let j = 0; j <= state.token; j++) {
      const v = values.row(state.layer, keyHead(), j);
      for (let i = 0; i < width; i++) result[i] += row[j] * v[i];
    }
    const order = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 4);
    const terms = order.filter((j) => row[j] > 0).map((j) => `${row[j].toFixed(3)} · v(${clip(tokenText(j), 10)})`);
    return [
      el('p', { class: 'numbers' }, `${terms.join(' + ')}${state.token >= terms.length ? ' + …' : ''}`),
      vector(say('part.weighted.result'), result, { kind: 'value', many: 8 }),
    ];
  },
  output: () => streamVector('attention_outputs', say('part.output.vector'), state.layer, state.token),
  add1: async () => {
    if (model.layers[state.layer].order !== 'sequential') return absence('attention_outputs');
    if (!has('middle_stats')) return absence('attention_outputs');
    const [hidden, added, stats] = await loadAll('hidden', 'attention_outputs', 'middle_stats');
    const total = addUp(hidden.row(state.layer, state.token), added.row(state.layer, state.token));
    const [mean, deviation, rms] = stats.row(state.layer, state.token);
    return [
      vector(say('part.sum'), total, { of: model.hidden_size }),
      el('p', { class: 'note' }, say('vector.stats', { mean: num(mean), deviation: num(deviation), rms: num(rms) })),
    ];
  },
  norm2: async () => {
    const { norm_before_mlp: norm, order } = model.layers[state.layer];
    if (!norm || order === 'other') return norm ? absence('attention_outputs') : null;
    const statistics = order === 'parallel' ? 'hidden_stats' : 'middle_stats';
    if (!has(statistics)) return absence('attention_outputs');
    const [hidden, added, stats] = await loadAll('hidden', 'attention_outputs', statistics);
    const before = hidden.row(state.layer, state.token);
    const read = order === 'parallel' ? before : addUp(before, added.row(state.layer, state.token));
    return normed(read, stats.row(state.layer, state.token), norm);
  },
  mixer: () => null,
  expand: async (values) => [
    el('p', { class: 'numbers' }, `${values.size} → ${values.wide} (× ${values.factor})`),
    has('neuron_ups')
      ? [para(has('neuron_gates') ? 'part.expand.gated' : 'part.expand.plain', values), await expandedTable()]
      : absence('mlp_ups'),
  ],
  activation: async (values) => {
    if (!has('neuron_values')) return absence('mlp_activations');
    if (!has('neuron_ups')) return neuronList(8);
    return [
      para(has('neuron_gates') ? 'part.activation.gated' : 'part.activation.plain', values, 'note'),
      await neuronList(NUM_EXPANDED, true),
    ];
  },
  contract: () => streamVector('mlp_outputs', say('part.contract.vector'), state.layer, state.token),
  add2: () => streamVector('hidden', say('part.sum'), state.layer + 1, state.token),
};

function addUp(a, b) {
  return Float32Array.from(a, (value, i) => value + b[i]);
}
