'use strict';
// D: experts, slots (choices a token at most), tokens (ids), labels by id, pieces as [first token, tokens], and for each layer its
// number n, flat choices c ([expert or -1, weight in thousandths, or -1 minus that if dropped] for each slot), and top tokens.
const D = JSON.parse(document.getElementById('data').textContent);
const byId = id => document.getElementById(id);
const text = byId('text'), spans = [...text.children], pop = byId('pop');
const state = { layer: 0, slot: 0, pick: -1 };
const percent = x => (100 * x).toFixed(x < 0.0995 ? 1 : 0) + '%';

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'style') element.style.cssText = value; else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function choice(layer, token, slot) {
  const at = 2 * (token * D.slots + slot), c = D.layers[layer].c, w = c[at + 1];
  return { expert: c[at], weight: (w < 0 ? -1 - w : w) / 1000, dropped: w < 0 };
}

function choices(layer, token) {
  const all = [];
  for (let slot = 0; slot < D.slots; slot++) {
    const found = choice(layer, token, slot);
    if (found.expert >= 0) all.push(found);
  }
  return all;
}

const chip = expert => make('span', { class: 'chip e' + expert }, String(expert));

// The choice that a token is coloured by: that of the chosen slot, or of the chosen expert where it is among them.
function shown(token) {
  if (state.pick < 0) return choice(state.layer, token, state.slot);
  return choices(state.layer, token).find(c => c.expert === state.pick) || { expert: -1, dropped: false };
}

function paint() {
  spans.forEach((span, i) => {
    const [first, count] = D.pieces[i];
    const found = [];
    for (let token = first; token < first + count; token++) found.push(shown(token));
    const one = found.every(c => c.expert === found[0].expert);
    span.className = (one && found[0].expert >= 0 ? 'e' + found[0].expert : 'none')
      + (found.some(c => c.expert >= 0 && c.dropped) ? ' drop' : '')
      + (state.pick >= 0 && found.every(c => c.expert < 0) ? ' dim' : '');
    // The bytes of one character may go different ways: it shows all of them.
    span.style.background = one ? '' : 'linear-gradient(90deg,' + found.map((c, j) =>
      `${c.expert < 0 ? 'transparent' : `var(--e${c.expert})`} ${100 * j / count}% ${100 * (j + 1) / count}%`) + ')';
  });
}

function loads(layer) {
  const counts = new Array(D.experts).fill(0);
  for (let token = 0; token < D.tokens.length; token++) for (const c of choices(layer, token)) counts[c.expert]++;
  return counts;
}

function legend() {
  const counts = loads(state.layer), all = Math.max(1, counts.reduce((a, b) => a + b, 0));
  const widest = Math.max(...counts, 1);
  byId('legend').replaceChildren(...counts.map((count, expert) => {
    const share = make('span', { class: 'share' }, make('b', { class: 'e' + expert, style: `width:${100 * count / widest}%` }),
      make('u', { style: `left:${Math.min(100, 100 * all / D.experts / widest)}%` }));
    const button = make('button', { 'aria-pressed': state.pick === expert, title: `expert ${expert}: ${count} of ${all} choices` },
      chip(expert), share, percent(count / all));
    button.onclick = () => set({ pick: state.pick === expert ? -1 : expert });
    return button;
  }));
}

function topTokens() {
  const rows = [], without = [];
  D.layers[state.layer].top.forEach((tokens, expert) => {
    if (!tokens.length) return without.push(expert);
    rows.push(make('div', {}, chip(expert), ...tokens.map(([id, count, occurrences]) =>
      make('span', { title: `${count} of ${occurrences} occurrences` },
        make('code', {}, D.labels[id]), ' ', make('small', {}, percent(count / occurrences))))));
  });
  byId('top').replaceChildren(...rows);
  byId('top-none').textContent = without.length ? `No token stands out for: ${without.join(', ')}.` : '';
}

// From each expert of one layer to each of the next, by first choices.
function flow() {
  const box = byId('flow');
  if (!box) return;
  const from = Math.min(state.layer, D.layers.length - 2), E = D.experts;
  const moves = Array.from({ length: E }, () => new Array(E).fill(0));
  let all = 0;
  for (let token = 0; token < D.tokens.length; token++) {
    const a = choice(from, token, 0).expert, b = choice(from + 1, token, 0).expert;
    if (a >= 0 && b >= 0) { moves[a][b]++; all++; }
  }
  byId('flow-title').textContent = `From layer ${D.layers[from].n} to layer ${D.layers[from + 1].n}`;
  byId('flow-box').replaceChildren(E <= 16 ? ribbons(moves, all, from) : heat(moves));
}

function ribbons(moves, all, from) {
  const E = D.experts, W = 1000, H = 380, gap = 5, left = 60, right = W - 60, room = H - 30 - gap * (E - 1);
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', `0 0 ${W} ${H}`);
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', 'tokens from each expert to each expert of the next layer');
  const add = (tag, attributes, content) => {
    const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (content !== undefined) element.textContent = content;
    svg.append(element);
    return element;
  };
  const scale = room / Math.max(1, all), sum = row => row.reduce((a, b) => a + b, 0);
  const into = moves.map((_, b) => sum(moves.map(row => row[b])));
  const starts = counts => { let y = 24; return counts.map(n => { const at = y; y += n * scale + gap; return at; }); };
  const outs = moves.map(sum), y1 = starts(outs), y2 = starts(into), used1 = [...y1], used2 = [...y2];
  add('text', { x: left, y: 14, 'text-anchor': 'end' }, `layer ${D.layers[from].n}`);
  add('text', { x: right, y: 14 }, `layer ${D.layers[from + 1].n}`);
  for (let a = 0; a < E; a++) for (let b = 0; b < E; b++) {
    const h = moves[a][b] * scale;
    if (!h) continue;
    const [p, q] = [used1[a], used2[b]], mid = (left + right) / 2;
    used1[a] += h;
    used2[b] += h;
    const path = add('path', { fill: `var(--e${a})`, d: `M${left + 16} ${p}C${mid} ${p} ${mid} ${q} ${right - 16} ${q}v${h}C${mid} ${q + h} ${mid} ${p + h} ${left + 16} ${p + h}Z` });
    const title = document.createElementNS('http://www.w3.org/2000/svg', 'title');
    title.textContent = `expert ${a} to expert ${b}: ${moves[a][b]} tokens, ${percent(moves[a][b] / outs[a])} of those of expert ${a}`;
    path.append(title);
  }
  for (let e = 0; e < E; e++) {
    add('rect', { x: left, y: y1[e], width: 16, height: Math.max(1, outs[e] * scale), fill: `var(--e${e})`, stroke: 'var(--line)' });
    add('rect', { x: right - 16, y: y2[e], width: 16, height: Math.max(1, into[e] * scale), fill: `var(--e${e})`, stroke: 'var(--line)' });
    if (outs[e] * scale > 9) add('text', { x: left - 8, y: y1[e] + outs[e] * scale / 2 + 4, 'text-anchor': 'end' }, e);
    if (into[e] * scale > 9) add('text', { x: right + 8, y: y2[e] + into[e] * scale / 2 + 4 }, e);
  }
  return svg;
}

function heat(moves) {
  const E = D.experts, canvas = make('canvas', { width: E, height: E, role: 'img', 'aria-label': 'tokens from each expert (rows) to each expert of the next layer (columns)' });
  const paper = canvas.getContext('2d'), most = Math.max(1, ...moves.flat());
  paper.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--hot');
  moves.forEach((row, a) => row.forEach((n, b) => {
    paper.globalAlpha = Math.sqrt(n / most);
    paper.fillRect(b, a, 1, 1);
  }));
  const note = make('p', { class: 'note' }, 'Rows: experts of the first layer; columns: of the second.');
  canvas.onpointermove = event => {
    const a = Math.min(E - 1, Math.floor(event.offsetY / canvas.clientHeight * E)), b = Math.min(E - 1, Math.floor(event.offsetX / canvas.clientWidth * E));
    note.textContent = `Expert ${a} to expert ${b}: ${moves[a][b]} tokens.`;
  };
  return make('div', {}, canvas, note);
}

function show(span) {
  const i = spans.indexOf(span);
  if (i < 0) return hide();
  const [first, count] = D.pieces[i], parts = [];
  for (let token = first; token < first + count; token++) {
    parts.push(make('div', {}, make('code', {}, D.labels[D.tokens[token]]), make('span'),
      make('small', {}, `token ${token}, id ${D.tokens[token]}`)));
    const all = choices(state.layer, token);
    if (!all.length) parts.push(make('small', {}, 'no expert chose it'));
    for (const c of all) {
      parts.push(make('div', {}, chip(c.expert), make('span', { class: 'share' },
        make('b', { class: 'e' + c.expert, style: `width:${Math.min(100, 100 * c.weight)}%` })),
        c.dropped ? make('em', {}, 'dropped') : c.weight.toFixed(3)));
    }
    parts.push(make('p', {}, make('small', {}, 'through the layers'), ...D.layers.map((_, layer) => {
      const { expert } = choice(layer, token, state.slot);
      return expert < 0 ? make('span', { class: 'chip' }, '–') : chip(expert);
    })));
  }
  pop.replaceChildren(...parts);
  pop.hidden = false;
  const at = span.getBoundingClientRect(), height = pop.offsetHeight;
  const above = at.bottom + 8 + height > innerHeight && at.top - 8 - height > 0;
  pop.style.top = `${above ? at.top - 8 - height : at.bottom + 8}px`;
  pop.style.left = `${Math.max(8, Math.min(at.left, innerWidth - 306))}px`;
  spans.forEach(other => other.classList.toggle('here', other === span));
}

function hide() {
  pop.hidden = true;
  spans.forEach(span => span.classList.remove('here'));
}

function set(change) {
  Object.assign(state, change);
  hide();
  paint();
  legend();
  topTokens();
  flow();
  for (const name of ['layer', 'slot']) {
    document.querySelectorAll(`[data-${name}]`).forEach(button => button.setAttribute('aria-pressed', Number(button.dataset[name]) === state[name]));
  }
  document.querySelectorAll('.loads td').forEach(cell =>
    cell.classList.toggle('here', Number(cell.dataset.at) === state.layer && Number(cell.dataset.expert) === state.pick));
  byId('all').hidden = state.pick < 0;
  byId('layer-note').textContent = D.layers[state.layer].note;
  byId('top-title').textContent = `Tokens that stand out, layer ${D.layers[state.layer].n}`;
}

document.querySelectorAll('[data-layer]').forEach(button => { button.onclick = () => set({ layer: Number(button.dataset.layer) }); });
document.querySelectorAll('[data-slot]').forEach(button => { button.onclick = () => set({ slot: Number(button.dataset.slot) }); });
document.querySelectorAll('.loads td').forEach(cell => {
  cell.onclick = () => set({ layer: Number(cell.dataset.at), pick: Number(cell.dataset.expert) });
});
byId('all').onclick = () => set({ pick: -1 });
text.onpointerover = event => show(event.target);
text.onpointerleave = hide;
text.onscroll = hide;
addEventListener('scroll', hide, { passive: true });
addEventListener('keydown', event => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) set({ layer: Math.max(0, Math.min(D.layers.length - 1, state.layer + step)) });
  if (event.key === 'Escape') set({ pick: -1 });
});
set({});
