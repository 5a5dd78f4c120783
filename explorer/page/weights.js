// Weights, which training set, and hyperparameters, which a person set before it.

const PART_ORDER = ['embedding', 'positions', 'attention', 'mlp', 'norm', 'head', 'other'];

function weightCount(weight) {
  return weight.shape.reduce((a, b) => a * b, 1);
}

/** A name that may be broken after its dots and underscores. */
function breakable(name) {
  return el(
    'code',
    {},
    name.match(/[^._]*[._]?/g).flatMap((piece) => [piece, el('wbr')]),
  );
}

/** Weights that differ in nothing but their block, as one row; in the order in which they first appear. */
function weightGroups() {
  const groups = new Map();
  for (const weight of model.weights) {
    const pattern =
      weight.layer === null ? weight.name : weight.name.replace(new RegExp(`\\.${weight.layer}\\.`), '.*.');
    const key = `${pattern} ${weight.shape}`;
    if (!groups.has(key))
      groups.set(key, { pattern, weights: [], shape: weight.shape, part: weight.part, tied: weight.tied_to });
    groups.get(key).weights.push(weight);
  }
  return [...groups.values()];
}

view('weights', [], (section) => {
  const own = model.weights.filter((weight) => !weight.tied_to);
  const total = own.reduce((all, weight) => all + weightCount(weight), 0);
  const share = (part) =>
    own.filter((weight) => weight.part === part).reduce((all, weight) => all + weightCount(weight), 0) / total;
  const parts = PART_ORDER.filter((part) => share(part) > 0);
  const stacked = el('div', {
    class: 'stacked',
    role: 'img',
    'aria-label': parts.map((part) => `${say(`weights.part.${part}`)} ${percent(share(part))}`).join(', '),
  });
  for (const part of parts) {
    const piece = el('span', {
      class: `piece ${part}`,
      title: `${say(`weights.part.${part}`)} ${percent(share(part))}`,
    });
    piece.style.width = `${share(part) * 100}%`;
    stacked.append(piece);
  }
  const size = (weight) => (weight.tied_to ? '0' : count(weightCount(weight)));
  const shareText = (many, tied) => (tied ? say('weights.tied') : percent(many / total));
  fill(
    section,
    heading('weights', {
      total: count(model.num_parameters),
      bytes: bytes(total * bytesPerWeight()),
      dtype: model.dtype,
    }),
    stacked,
    el(
      'p',
      { class: 'note legend' },
      parts
        .map((part) => [
          el('span', { class: `swatch ${part}` }),
          ` ${say(`weights.part.${part}`)} ${percent(share(part))} `,
        ])
        .flat(),
    ),
    table(
      say('weights.grouped'),
      ['name', 'part', 'shape', 'each', 'blocks', 'sum', 'share'].map((name) => say(`weights.${name}`)),
      weightGroups().map((group) => {
        const many = group.weights.length * weightCount(group.weights[0]);
        return [
          breakable(group.pattern),
          say(`weights.part.${group.part}`),
          shape(...group.shape),
          count(weightCount(group.weights[0])),
          group.weights[0].layer === null ? '–' : `× ${group.weights.length}`,
          group.tied ? '0' : count(many),
          shareText(many, group.tied),
        ];
      }),
      'weights-table',
    ),
    el(
      'details',
      {},
      el('summary', {}, say('weights.every', { many: count(model.weights.length) })),
      table(
        say('weights.every', { many: count(model.weights.length) }),
        ['name', 'part', 'shape', 'sum', 'share'].map((name) => say(`weights.${name}`)),
        model.weights.map((weight) => [
          el('code', {}, weight.name),
          say(`weights.part.${weight.part}`),
          shape(...weight.shape),
          size(weight),
          shareText(weightCount(weight), weight.tied_to),
        ]),
      ),
    ),
  );
});

function bytesPerWeight() {
  return { float32: 4, float64: 8, float16: 2, bfloat16: 2 }[model.dtype.replace('torch.', '')] ?? 4;
}

/** What a field of the config shapes: its own sentence, one by its pattern, or the general one. */
function hyperparameterText(name) {
  const known = [
    [/^(hidden_size|n_embd|d_model|embed_dim|word_embed_proj_dim)$/, 'hidden'],
    [/^(num_hidden_layers|n_layer|num_layers)$/, 'layers'],
    [/^(num_attention_heads|n_head|num_heads)$/, 'heads'],
    [/^num_key_value_heads$/, 'kvheads'],
    [/^head_dim$/, 'dim'],
    [/^(intermediate_size|n_inner|ffn_dim|ffn_hidden_size)$/, 'wide'],
    [/^vocab_size$/, 'vocabulary'],
    [/^(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length)$/, 'positions'],
    [/^(hidden_act|activation_function|hidden_activation)$/, 'activation'],
    [/^mlp_type$/, 'mlp'],
    [/^norm_type$/, 'norm'],
    [/(norm.*eps|layer_norm_epsilon|norm_epsilon)/, 'eps'],
    [/^(rope_|rotary_|partial_rotary)/, 'rope'],
    [/^position_embedding_type$/, 'positiontype'],
    [/^no_rope_layers/, 'norope'],
    [/^(qk_norm|use_qk_norm)$/, 'qknorm'],
    [/(drop|pdrop)/, 'dropout'],
    [/^(initializer_range|init_std)/, 'init'],
    [/^tie_word_embeddings$/, 'tie'],
    [/bias$/, 'bias'],
    [/(sliding_window|max_window_layers|layer_types)/, 'window'],
    [/(bos|eos|pad|unk|sep)_token_id$/, 'ids'],
    [/^use_cache$/, 'cache'],
    [/^(torch_)?dtype$/, 'dtype'],
    [/^(scale_attn|attention_multiplier|query_pre_attn|attn_logit)/, 'scale'],
    [/^attention_chunk_size$/, 'chunk'],
    [/^(embedding_multiplier|residual_multiplier|logits_scaling|logit_scale|scale_embedding)$/, 'multiplier'],
    [/^final_logit_softcapping$/, 'cap'],
    [/(expert|router)/, 'experts'],
    [/^(architectures|model_type|auto_map|transformers_version|_name_or_path|name_or_path)$/, 'names'],
  ].find(([pattern]) => pattern.test(name));
  return say(`hyper.${known ? known[1] : 'other'}`);
}

view('hyperparameters', [], (section) => {
  const shown = (value) => {
    if (Array.isArray(value) && value.length > 6 && value.every((item) => item === value[0]))
      return `${value.length} × ${JSON.stringify(value[0])}`;
    return clip(JSON.stringify(value), 120);
  };
  const symbols = [
    ['B', 1],
    ['T', PROMPT_TOKENS],
    ['S', NUM_TOKENS],
    ['L', model.num_layers],
    ['E', model.hidden_size],
    ['H', model.num_heads],
    ['K', model.num_key_value_heads],
    ['D', model.head_dim],
    ['F', Math.max(...model.layers.map((layer) => layer.mlp_width))],
    ['V', model.vocab_size],
  ];
  fill(
    section,
    heading('hyperparameters', { many: model.hyperparameters.length }),
    el(
      'dl',
      { class: 'facts letters' },
      symbols.map(([letter, value]) => fact(`${letter} · ${say(`letter.${letter}`)}`, count(value))),
    ),
    table(
      say('hyperparameters.title'),
      [say('hyperparameters.name'), say('hyperparameters.value'), say('hyperparameters.shapes')],
      model.hyperparameters.map(([name, value]) => [
        breakable(name),
        el('code', {}, shown(value)),
        hyperparameterText(name),
      ]),
      'prose-table',
    ),
  );
});
