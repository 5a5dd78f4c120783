// Pictures that several sections share: vectors as strips, token rows, bars.

/** A canvas with one pixel per value, which CSS scales up; colour(value) gives [r, g, b]. */
function pixels(columns, rows, colour) {
  const canvas = el('canvas', { width: columns, height: rows, class: 'pixels' });
  const context = canvas.getContext('2d');
  const image = context.createImageData(columns, rows);
  for (let i = 0; i < columns * rows; i++) {
    const [r, g, b] = colour(i);
    image.data.set([r, g, b, 255], i * 4);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function between(from, to, share) {
  const [a, b] = [palette.rgb[from], palette.rgb[to]];
  return [0, 1, 2].map((i) => a[i] + (b[i] - a[i]) * share);
}

/** Zero is the ground; positive goes to the accent, negative to its opposite. */
function signedColour(value, maximum) {
  const share = Math.min(Math.abs(value) / (maximum || 1), 1) ** 0.6;
  return between('panel', value >= 0 ? 'accent' : 'minus', share);
}

/** Light for 0, full for 1; the root lets small weights be seen. */
function heatColour(share) {
  return between('panel', 'heat', Math.min(share, 1) ** 0.5);
}

function largest(values) {
  let result = 0;
  for (const value of values) if (Math.abs(value) > result) result = Math.abs(value);
  return result;
}

function firstNumbers(values, many = 6) {
  return `[${Array.from(values.slice(0, many), (value) => num(value)).join(', ')}${values.length > many ? ', …' : ''}]`;
}

/**
 * A vector: a strip of colours, and its first numbers.
 * @param {string} name What stands before it, for example "q".
 * @param {ArrayLike<number>} values
 * @param {{of?: number, kind?: string, maximum?: number, many?: number}} options of: the size of the whole vector where
 *   only its beginning is on the page; kind: "query", "key" or "value" for its identity's colour; maximum: of the colours.
 */
function vector(name, values, { of = values.length, kind = '', maximum = largest(values), many = 6 } = {}) {
  const canvas = pixels(values.length, 1, (i) => signedColour(values[i], maximum));
  const partly = of > values.length ? say('vector.partly', { shown: count(values.length), all: count(of) }) : '';
  const size = say('vector.size', { size: count(of) });
  canvas.setAttribute('role', 'img');
  canvas.setAttribute('aria-label', `${name}, ${size} ${firstNumbers(values)}`);
  const resting = many ? firstNumbers(values, many) : '';
  const readout = el('span', { class: 'numbers' }, resting);
  canvas.addEventListener('pointermove', (event) => {
    const box = canvas.getBoundingClientRect();
    const index = Math.min(
      Math.max(Math.floor(((event.clientX - box.left) / box.width) * values.length), 0),
      values.length - 1,
    );
    readout.textContent = `[${index}] = ${num(values[index], 4)}`;
  });
  canvas.addEventListener('pointerleave', () => {
    readout.textContent = resting;
  });
  return el(
    'div',
    { class: `vector ${kind}` },
    el(
      'div',
      { class: 'vector-name' },
      el('b', {}, name),
      ' ',
      el('span', { class: 'note' }, [size, partly].filter(Boolean).join('; ')),
    ),
    canvas,
    readout,
  );
}

/**
 * Rows of a bar each.
 * @param {{label: string|Node, value: number, note: string, kind?: string}[]} rows value: the bar's share of the width, 0 to 1.
 */
function bars(rows, kind = '', label = null) {
  return el(
    'ul',
    // Those that scroll can be reached without a pointer.
    { class: `bars ${kind}`, tabindex: kind === 'tall' ? '0' : null, 'aria-label': label },
    rows.map((row) => {
      const fillNode = el('span', { class: `bar-fill ${row.kind ?? ''}` });
      fillNode.style.width = `${Math.max(0, Math.min(1, row.value)) * 100}%`;
      return el(
        'li',
        { class: row.kind === 'hidden' ? 'hidden' : null },
        el('span', { class: 'bar-label' }, row.label),
        el('span', { class: 'bar-track' }, fillNode),
        el('span', { class: 'bar-note' }, row.note),
      );
    }),
  );
}

/**
 * The text as a row of tokens, one of which is chosen; arrow keys move through it.
 * @param {object} options
 * @param {string} options.name Of this row, so that focus finds its place after drawing again.
 * @param {string} options.label What it is, for those who do not see it.
 * @param {number} options.chosen
 * @param {function(number): void} options.choose
 * @param {function(number): void} [options.peek] While the pointer is over a token or focus on it.
 * @param {function(): void} [options.leave]
 * @param {function(number): {colour?: number[], note?: string}} [options.look]
 */
function tokenRow({ name, label, chosen, choose, peek, leave, look = () => ({}) }) {
  const row = el('div', { class: 'token-row', role: 'listbox', 'aria-label': label, 'aria-orientation': 'horizontal' });
  for (let i = 0; i < NUM_TOKENS; i++) {
    const { colour, note } = look(i);
    const token = el(
      'span',
      {
        class: i >= PROMPT_TOKENS ? 'token new' : 'token',
        role: 'option',
        'aria-selected': String(i === chosen),
        'aria-label': `${i}: ${facts.tokens[i].text}${note ? `, ${note}` : ''}`,
        tabindex: i === chosen ? '0' : '-1',
        'data-index': String(i),
        'data-focus': i === chosen ? name : null,
        title: note ?? null,
      },
      tokenText(i),
    );
    if (colour) tint(token, colour);
    row.append(token);
    if (facts.tokens[i].text.includes('\n')) row.append(el('span', { class: 'break', role: 'presentation' }));
  }
  const at = (event) => {
    const token = event.target.closest('.token');
    return token ? Number(token.dataset.index) : null;
  };
  row.addEventListener('click', (event) => {
    const index = at(event);
    if (index !== null) choose(index);
  });
  row.addEventListener('keydown', (event) => {
    const index = at(event);
    const to = { ArrowRight: state.token + 1, ArrowLeft: state.token - 1, Home: 0, End: NUM_TOKENS - 1 }[event.key];
    if (index === null || to === undefined) return;
    event.preventDefault();
    choose(Math.min(Math.max(to, 0), NUM_TOKENS - 1));
  });
  if (peek) {
    const over = (event) => at(event) !== null && peek(at(event));
    row.addEventListener('pointerover', over);
    row.addEventListener('focusin', over);
    row.addEventListener('pointerleave', leave);
    row.addEventListener('focusout', leave);
  }
  return row;
}

/** A choice between a few: buttons of which one is pressed. */
function choices(label, options, chosen, choose) {
  return el(
    'div',
    { class: 'choices', role: 'group', 'aria-label': label },
    options.map(([value, text]) =>
      el(
        'button',
        {
          type: 'button',
          'aria-pressed': String(value === chosen),
          'data-focus': `${label}-${value}`,
          onclick: () => choose(value),
        },
        text,
      ),
    ),
  );
}

/** A table in a box that scrolls by itself, so that the page never scrolls sideways. */
function table(label, head, rows, kind = '') {
  return el(
    'div',
    { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label },
    el(
      'table',
      { class: kind },
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          head.map((text) => el('th', { scope: 'col' }, text)),
        ),
      ),
      el(
        'tbody',
        {},
        rows.map((cells) =>
          el(
            'tr',
            {},
            cells.map((cell, i) => el(i ? 'td' : 'th', { scope: i ? null : 'row' }, cell)),
          ),
        ),
      ),
    ),
  );
}
