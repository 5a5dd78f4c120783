// Undoes deflate (RFC 1951) where a browser cannot: those before 2023 have no DecompressionStream.

const LENGTH_BASES = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/** Canonical Huffman codes: how many there are of each length, and the symbols in the order of their codes. */
function huffman(lengths) {
  const counts = new Uint16Array(16);
  for (const length of lengths) counts[length] += 1;
  counts[0] = 0;
  const starts = new Uint16Array(17);
  for (let i = 1; i < 16; i++) starts[i + 1] = starts[i] + counts[i];
  const symbols = new Uint16Array(lengths.length);
  lengths.forEach((length, symbol) => {
    if (length) symbols[starts[length]++] = symbol;
  });
  return { counts, symbols };
}

/**
 * The bytes behind a zlib stream (RFC 1950).
 * @param {Uint8Array} source
 * @returns {Uint8Array} In a buffer of just its size.
 */
function inflated(source) {
  let [place, held, bits] = [2, 0, 0]; // behind the two bytes of zlib's head
  let result = new Uint8Array(source.length * 4);
  let length = 0;

  const take = (count) => {
    while (bits < count) {
      held |= source[place++] << bits;
      bits += 8;
    }
    const value = held & ((1 << count) - 1);
    held >>>= count;
    bits -= count;
    return value;
  };
  const symbol = ({ counts, symbols }) => {
    let [code, first, index] = [0, 0, 0];
    for (let size = 1; size < 16; size++) {
      code |= take(1);
      if (code - counts[size] < first) return symbols[index + code - first];
      index += counts[size];
      first = (first + counts[size]) << 1;
      code <<= 1;
    }
    throw new Error('damaged data');
  };
  const reserve = (more) => {
    if (length + more <= result.length) return;
    const larger = new Uint8Array(Math.max(result.length * 2, length + more));
    larger.set(result);
    result = larger;
  };
  const stored = () => {
    [held, bits] = [0, 0];
    const size = source[place] | (source[place + 1] << 8);
    reserve(size);
    result.set(source.subarray(place + 4, place + 4 + size), length);
    place += 4 + size;
    length += size;
  };
  const ownCodes = () => {
    const [literals, distances, codes] = [take(5) + 257, take(5) + 1, take(4) + 4];
    const sizes = new Array(19).fill(0);
    for (let i = 0; i < codes; i++) sizes[CODE_ORDER[i]] = take(3);
    const tree = huffman(sizes);
    const lengths = [];
    while (lengths.length < literals + distances) {
      const next = symbol(tree);
      if (next < 16) lengths.push(next);
      else if (next === 16) lengths.push(...new Array(take(2) + 3).fill(lengths[lengths.length - 1]));
      else lengths.push(...new Array(next === 17 ? take(3) + 3 : take(7) + 11).fill(0));
    }
    return [huffman(lengths.slice(0, literals)), huffman(lengths.slice(literals))];
  };
  const fixedCodes = () => [
    huffman(Array.from({ length: 288 }, (_, i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))),
    huffman(new Array(30).fill(5)),
  ];
  const coded = ([literals, distances]) => {
    for (let next = symbol(literals); next !== 256; next = symbol(literals)) {
      reserve(258);
      if (next < 256) {
        result[length++] = next;
        continue;
      }
      const count = LENGTH_BASES[next - 257] + take(LENGTH_BITS[next - 257]);
      const far = symbol(distances);
      const extra = far < 4 ? 0 : (far >> 1) - 1;
      const back = (far < 4 ? far : (2 + (far & 1)) << extra) + 1 + take(extra);
      for (let i = 0; i < count; i++, length++) result[length] = result[length - back];
    }
  };

  for (let last = 0; !last; ) {
    last = take(1);
    const kind = take(2);
    if (kind === 0) stored();
    else coded(kind === 1 ? fixedCodes() : ownCodes());
  }
  return result.slice(0, length);
}
