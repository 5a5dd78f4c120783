// What each pass of inference has to do, and the picture of the cache while it does it.

const NUM_STEPS = facts.steps.length;

/** First and one past the last token that a pass is given: all before the one that it chooses, or the last of them. */
function queriesOf(step) {
  const { token, num_queries: queries } = facts.steps[step];
  return [token - queries, token];
}

/**
 * The cache, a row per layer and a column per position, while a pass is under way.
 * @param {number} step
 * @param {number} progress 0 to 1: layers are passed from the bottom to the top.
 * @param {boolean} cached False draws the same pass without a cache, where all tokens so far are computed again.
 */
function drawCache(canvas, step, progress, cached) {
  const L = model.num_layers;
  const columns = NUM_TOKENS;
  const width = canvas.parentElement.clientWidth;
  const label = 34;
  const cell = (width - label) / columns;
  const rowHeight = Math.max(7, Math.min(34, 220 / L));
  const gap = cell > 6 ? 1 : 0.5;
  const [first, to] = queriesOf(step);
  const from = cached ? first : 0;
  const reached = progress * L; // layers done
  paint(canvas, width, L * rowHeight + 22, (context, _, height) => {
    context.font = palette.font;
    context.textBaseline = 'middle';
    for (let layer = 0; layer < L; layer++) {
      const y = (L - 1 - layer) * rowHeight; // the first layer at the bottom: data flow upwards, as in the papers
      const now = reached >= layer && reached < layer + 1;
      if (L <= 16 || layer % 4 === 0) {
        context.fillStyle = now ? palette.accent : palette.faint;
        context.fillText(String(layer), 4, y + rowHeight / 2);
      }
      for (let column = 0; column < columns; column++) {
        const x = label + column * cell;
        const keeps = !cached || facts.cache_bytes_per_token[layer] > 0;
        const before = cached && keeps && column < first && reads(layer, step, column);
        const written = keeps && column >= from && column < to && reached > layer;
        if (before) {
          context.fillStyle = now ? palette.key : mixed('panel', 'key', 0.38);
        } else if (written) {
          const share = now ? 0.5 + 0.5 * (reached - layer) : 0.75;
          context.fillStyle = column < first ? mixed('panel', 'ink', share * 0.6) : mixed('panel', 'accent', share);
        } else {
          context.fillStyle = palette.mask;
        }
        context.fillRect(x, y, cell - gap, rowHeight - 1);
      }
    }
    context.fillStyle = palette.faint;
    context.fillText('↑', 8, height - 10);
    context.fillStyle = cached ? palette.accent : palette.ink;
    context.fillRect(label + from * cell, height - 18, (to - from) * cell - gap, 3);
    context.textAlign = to - from > 2 || from > columns / 2 ? 'right' : 'left';
    const text = say(to - from > 1 ? 'player.queries.prefill' : 'player.queries.decode', { queries: to - from });
    const measured = context.measureText(text).width;
    let x = label + (context.textAlign === 'right' ? to * cell : from * cell);
    if (context.textAlign === 'right' && x - measured < label) {
      context.textAlign = 'left';
      x = Math.min(label + from * cell, width - measured);
    }
    context.fillText(text, x, height - 7);
  });
}

/** Whether the last query of a pass reads a position: a sliding layer has let go what its window has passed. */
function reads(layer, step, column) {
  return sees(layer, facts.steps[step].token - 1, column);
}

/** Measured time of each pass as bars, with the cache and without, on one scale; the chosen pass is marked. */
function drawTimes(canvas, step) {
  const width = canvas.parentElement.clientWidth;
  const steps = Math.max(NUM_STEPS, facts.uncached.length);
  const times = [...facts.steps, ...facts.uncached].map((item) => item.duration_s);
  const top = Math.max(...times);
  const [left, height] = [52, 132];
  const slot = Math.min((width - left) / steps, 80);
  paint(canvas, width, height, (context) => {
    context.font = palette.font;
    context.textBaseline = 'middle';
    const base = height - 18;
    const y = (time) => base - (time / top) * (base - 10);
    context.strokeStyle = palette.line;
    context.fillStyle = palette.faint;
    context.textAlign = 'right';
    for (const share of [0, 0.5, 1]) {
      context.beginPath();
      context.moveTo(left, y(top * share));
      context.lineTo(left + slot * steps, y(top * share));
      context.stroke();
      context.fillText(duration(top * share), left - 5, Math.max(y(top * share), 7));
    }
    context.textAlign = 'center';
    for (let i = 0; i < steps; i++) {
      const x = left + i * slot;
      const bar = (item, shift, colour) => {
        if (!item) return;
        context.fillStyle = colour;
        context.fillRect(x + slot * shift, y(item.duration_s), slot * 0.36, base - y(item.duration_s));
      };
      if (i === step) {
        context.fillStyle = palette.mask;
        context.fillRect(x + 1, 0, slot - 2, height);
      }
      bar(facts.steps[i], 0.12, i === step ? palette.accent : mixed('panel', 'accent', 0.6));
      bar(facts.uncached[i], 0.52, i === step ? palette.ink : mixed('panel', 'ink', 0.4));
      if (slot > 14 || i % 4 === 0) {
        context.fillStyle = i === step ? palette.ink : palette.faint;
        context.fillText(String(i), x + slot / 2, height - 8);
      }
    }
  });
}

/** Sum of a field over the passes up to and with this one. */
function soFar(passes, field, step) {
  return passes.slice(0, step + 1).reduce((total, item) => total + item[field], 0);
}

function exactBytes(value) {
  return value < 1024 ? bytes(value) : `${bytes(value)} (${count(value)} B)`;
}

/** The pass beside the same pass without a cache, as rows of a table. */
function comparison(step) {
  const [own, other] = [facts.steps[step], facts.uncached[step]];
  const row = (name, field, show) => [say(`player.${name}`), show(own[field]), other ? show(other[field]) : '–'];
  const about = facts.left_out.some((item) => item.part === 'weight_bytes_read') ? '≈ ' : '';
  return [
    row('num_queries', 'num_queries', count),
    row('num_keys', 'num_keys', count),
    row('flops', 'flops', flops),
    row('weight_bytes', 'weight_bytes_read', (value) => `${about}${bytes(value)}`),
    row('cache_read', 'cache_bytes_read', exactBytes),
    row('cache_held', 'cache_bytes', exactBytes),
    row('cache_allocated', 'cache_bytes_allocated', exactBytes),
    row('time', 'duration_s', duration),
    [
      say('player.time_so_far'),
      duration(soFar(facts.steps, 'duration_s', step)),
      duration(soFar(facts.uncached, 'duration_s', step)),
    ],
    [say('player.flops_so_far'), flops(soFar(facts.steps, 'flops', step)), flops(soFar(facts.uncached, 'flops', step))],
  ];
}
