// @ts-check
// The parts of the console that need a script: live sections, keyboard shortcuts, copying, selection, filter
// completion and relative times. Every page works without it.

/** @type {<T extends Element>(selector: string, within?: ParentNode) => T | null} */
const one = (selector, within = document) => within.querySelector(selector);
/** @type {<T extends HTMLElement>(selector: string, within?: ParentNode) => T[]} */
const all = (selector, within = document) => /** @type {any} */ ([...within.querySelectorAll(selector)]);

// Times.

/** @param {number} seconds */
function lasted(seconds) {
	if (seconds < 60) return `${Math.floor(seconds)} s`;
	const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
	if (hours < 1) return `${minutes} min`;
	if (hours < 10 && minutes % 60) return `${hours} h ${minutes % 60} min`;
	if (hours < 48) return `${hours} h`;
	return `${Math.floor(hours / 24)} d`;
}

function updateTimes() {
	for (const time of all("time[data-ago], time[data-due]")) {
		const at = Date.parse(time.getAttribute("datetime") ?? "");
		if (Number.isNaN(at) || at < 0) continue;
		const since = (Date.now() - at) / 1000;
		const text = since < 0 ? `in ${lasted(-since)}` : "due" in time.dataset ? "now" : since < 10 ? "just now" : `${lasted(since)} ago`;
		if (time.textContent !== text) time.textContent = text;
	}
}
setInterval(updateTimes, 10_000);

// Copying, by a click or with the keyboard. If the browser does not permit it (plain HTTP), the text is
// selected instead.

const announcement = document.createElement("p");
announcement.className = "hide";
announcement.setAttribute("role", "status");
document.body.append(announcement);

/** @param {ParentNode} within */
function copyable(within) {
	for (const from of all("[data-copy]", within)) {
		from.tabIndex = 0;
		if (!from.title) from.title = "copy";
	}
}
copyable(document);

/** @param {HTMLElement} from */
async function copy(from) {
	try {
		await navigator.clipboard.writeText(from.dataset.copy ?? "");
	} catch {
		getSelection()?.selectAllChildren(from);
		announcement.textContent = "Text selected. Copy it with the keyboard.";
		return;
	}
	announcement.textContent = "Copied.";
	from.dataset.copied = "";
	setTimeout(() => { delete from.dataset.copied; announcement.textContent = ""; }, 1500);
}
document.addEventListener("click", (event) => {
	const from = event.target instanceof Element ? event.target.closest("[data-copy]") : null;
	const selection = getSelection();
	if (from instanceof HTMLElement && (!selection?.toString() || !selection.containsNode(from, true))) copy(from);
});
document.addEventListener("keydown", (event) => {
	if (event.key !== "Enter" || !(event.target instanceof HTMLElement) || !event.target.matches("[data-copy]")) return;
	event.preventDefault();
	copy(event.target);
});

// The link to the page, as the address bar has it: filters and dialogs may change it.
const copyLink = /** @type {HTMLElement | null} */ (one("[data-copy-link]"));
if (copyLink) {
	copyLink.hidden = false;
	copyLink.addEventListener("click", () => { copyLink.dataset.copy = location.origin + (document.body.dataset.page ?? location.pathname + location.search); });
}

// The sign-in page knows where the provider sends the browser back to.

const elsewhere = /** @type {HTMLElement | null} */ (one("[data-origin]"));
if (elsewhere && elsewhere.dataset.origin !== location.origin) elsewhere.hidden = false;

// The time zone: the page that chooses it offers that of the browser.

const zoneField = /** @type {HTMLInputElement | null} */ (one("[data-zone-field]"));
const browserZone = Intl.DateTimeFormat().resolvedOptions().timeZone;
if (zoneField && browserZone && browserZone !== zoneField.value) {
	const use = document.createElement("button");
	use.textContent = `Use ${browserZone}`;
	use.addEventListener("click", () => { zoneField.value = browserZone; });
	zoneField.form?.append(use);
}

/**
 * Formats a time of day as the server does.
 * @param {string} at RFC 3339, UTC
 */
function clock(at) {
	const timeZone = document.documentElement.dataset.zone;
	if (!timeZone) return `${at.slice(11, 19)} UTC`;
	return new Intl.DateTimeFormat("en-GB", { timeZone, hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" }).format(new Date(at));
}

// Light or dark.

const themeSwitch = /** @type {HTMLElement | null} */ (one("[data-theme-switch]"));
if (themeSwitch) {
	themeSwitch.hidden = false;
	themeSwitch.addEventListener("click", () => {
		const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
		const theme = dark ? "light" : "dark";
		document.documentElement.dataset.theme = theme;
		document.cookie = `dlqd-theme=${theme}; path=/; max-age=31536000; samesite=strict${location.protocol === "https:" ? "; secure" : ""}`;
	});
}

// Live sections. A section is updated in place. New rows of a list wait behind a button. A section with a field
// that the viewer edits is not updated.

const connection = /** @type {HTMLElement | null} */ (one("[data-connection]"));
/** @type {number | undefined} */
let staleTimer;
// When the server rendered what the page shows (RFC 3339, UTC).
let shownAt = new Date().toISOString();

/** @param {"live" | "not live" | "lost" | "trouble"} state */
function connected(state, detail = "") {
	if (!connection) return;
	const stale = state === "lost" || state === "trouble";
	connection.hidden = state === "not live";
	connection.classList.toggle("lost", stale);
	document.body.classList.toggle("stale", stale);
	connection.textContent = !stale ? state : `${state === "lost" ? "connection lost" : detail}, showing ${clock(shownAt)}`;
	const since = stale ? document.createElement("time") : null;
	if (since) { // how old the page is
		since.dateTime = shownAt;
		since.dataset.ago = "";
		connection.append(" ", since);
		updateTimes();
	}
}

// A link or a form that takes longer than 300 ms shows that the next page is coming.
addEventListener("beforeunload", () => {
	document.body.classList.add("leaving");
	setTimeout(() => document.body.classList.remove("leaving"), 10_000); // a download does not leave the page
});
addEventListener("pageshow", () => document.body.classList.remove("leaving"));

/**
 * Reports whether the user typed what a field has: in this page, or before a sign-in.
 * @param {HTMLInputElement | HTMLTextAreaElement} field
 */
const typed = (field) => field.value !== field.defaultValue || "typed" in field.dataset;

/** @param {Element} old @param {Element} fresh */
function busy(old, fresh) {
	const active = document.activeElement;
	for (const field of old.querySelectorAll("input, textarea, select")) {
		if (field instanceof HTMLSelectElement ? [...field.options].some((option) => option.selected !== option.defaultSelected && option.index > 0) :
			typed(/** @type {HTMLInputElement} */ (field))) return true;
	}
	return active instanceof HTMLElement && old.contains(active) && (active.matches("input, textarea, select, button, summary, [data-copy]") || !fresh.innerHTML);
}

// A range of times is drawn in a chart. Without a script, it is typed below the chart.

for (const hint of all(".brush-hint")) hint.hidden = false;
/** @type {{figure: HTMLElement, mark: HTMLElement, from: number, left: number, width: number} | undefined} */
let brush;
/** @param {PointerEvent} event */
function brushed(event) {
	if (!brush) return [0, 0];
	const to = Math.min(Math.max((event.clientX - brush.left) / brush.width, 0), 1);
	return [Math.min(brush.from, to), Math.max(brush.from, to)];
}
document.addEventListener("pointerdown", (event) => {
	const chart = event.target instanceof Element ? event.target.closest("[data-brush] .chart") : null, figure = chart?.closest("figure");
	if (!chart || !figure || event.button !== 0 || event.pointerType === "touch") return;
	event.preventDefault();
	const { left, width } = chart.getBoundingClientRect(), mark = document.createElement("div");
	mark.className = "brush";
	figure.append(mark);
	brush = { figure, mark, from: Math.min(Math.max((event.clientX - left) / width, 0), 1), left, width };
});
document.addEventListener("pointermove", (event) => {
	if (!brush) return;
	const [from, to] = brushed(event);
	brush.mark.style.left = `${from * 100}%`;
	brush.mark.style.width = `${(to - from) * 100}%`;
});
document.addEventListener("pointerup", (event) => {
	if (!brush) return;
	const { figure, mark, width } = brush, [from, to] = brushed(event);
	mark.remove();
	brush = undefined;
	if ((to - from) * width < 4) return; // a click
	const first = Date.parse(figure.dataset.from ?? ""), last = Date.parse(figure.dataset.to ?? ""), step = Number(figure.dataset.step) * 1000;
	const time = (/** @type {number} */ at) => new Date(at).toISOString().replace(/\.\d+/, "");
	const range = new URLSearchParams({
		q: figure.dataset.brush ?? "", from: time(Math.floor((first + from * (last - first)) / step) * step), to: time(Math.ceil((first + to * (last - first)) / step) * step),
	});
	location.assign(`/dead-letters?${range}`);
});
document.addEventListener("pointercancel", () => { brush?.mark.remove(); brush = undefined; });

// While a button of the mouse or a finger is down, nothing changes: a click must hit one element.
let pressed = false;
/** @type {Map<string, string>} */
const held = new Map();
addEventListener("pointerdown", (event) => {
	pressed = event.button === 0 && event.target instanceof Element && event.target.closest("a, button, input, select, textarea, summary, label, [data-copy], [data-brush] .chart") !== null;
});
for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => setTimeout(() => { // after the click
	pressed = false;
	for (const [name, html] of [...held]) show(html, name);
}));

/** @param {string} html @param {string} [name] */
function show(html, name = "page") {
	if (pressed) {
		held.set(name, html);
		return;
	}
	held.delete(name);
	const fresh = new DOMParser().parseFromString(html, "text/html");
	for (const part of fresh.querySelectorAll("[data-live][id]")) {
		const old = document.getElementById(part.id);
		if (!old) {
			if ("rows" in /** @type {HTMLElement} */ (part).dataset) announceRows(all("[data-id]", part).length); // the list was empty
			continue;
		}
		if ("rows" in /** @type {HTMLElement} */ (part).dataset) {
			showRows(old, part);
			continue;
		}
		/** @type {HTMLElement} */ (old).hidden = /** @type {HTMLElement} */ (part).hidden;
		if (old.innerHTML === part.innerHTML || busy(old, part)) continue;
		replace(/** @type {HTMLElement} */ (old), part);
		if (name === "page") endFlash();
	}
	updateTimes();
	showWaiting();
}

/** @param {HTMLElement} target */
function focusOn(target) {
	if (!target.matches("a[href], button, input, select, textarea, summary, [tabindex]")) target.tabIndex = -1;
	target.focus({ preventScroll: true });
}

/**
 * Replaces the content of an element. What was open stays open. The focus goes to the new form of the part that had it,
 * or to the element if there is none.
 * @param {HTMLElement} old @param {Element} fresh
 */
function replace(old, fresh) {
	const open = all("details[open] > summary", old).map((summary) => summary.textContent);
	const active = /** @type {HTMLElement | null} */ (document.activeElement), inside = active && active !== old && old.contains(active);
	const id = inside && active.id, href = inside && active.getAttribute("href");
	const same = id ? `#${CSS.escape(id)}` : href ? `[href="${CSS.escape(href)}"]` : null;
	const nth = same ? all(same, old).indexOf(active ?? old) : -1;
	old.replaceChildren(...document.importNode(fresh, true).childNodes);
	for (const summary of all("details > summary", old)) {
		if (open.includes(summary.textContent)) /** @type {HTMLDetailsElement} */ (summary.parentElement).open = true;
	}
	copyable(old);
	if (inside) focusOn(same && (all(same, old)[nth] ?? one(same, old)) || old);
}

// The result of an action is shown until the page shows a later state, for ten seconds at least; one that can be undone
// stays.
const flashedAt = Date.now();
function endFlash() {
	const flash = one(".flash.ok[role=status]");
	if (flash && !one("form", flash) && Date.now() - flashedAt > 10_000) flash.remove();
}

// The number of requests that wait for the viewer's approval is also in the title and the icon of the tab.
const title = document.title.replace(/^\(\d+\) /, ""), tabIcon = /** @type {HTMLLinkElement | null} */ (one("link[rel=icon]"));
function showWaiting() {
	const waiting = document.getElementById("waits-approvals")?.textContent;
	document.title = waiting ? `(${waiting}) ${title}` : title;
	const icon = waiting ? tabIcon?.dataset.waiting : tabIcon?.dataset.icon;
	if (tabIcon && icon && tabIcon.getAttribute("href") !== icon) tabIcon.href = icon;
}

// A hidden page closes its stream. One of the browser's hidden pages, which has the lock, listens for all of them, so
// that their tabs show what waits. Over plain HTTP from another machine there are no locks: then a hidden page is
// updated once it is visible.
const hiddenPages = new BroadcastChannel("dlqd-own");
hiddenPages.addEventListener("message", (event) => { if (document.hidden) show(event.data, "own"); });
let listening = new AbortController();
function listenHidden() {
	listening.abort();
	listening = new AbortController();
	const { signal } = listening, from = document.body.dataset.events;
	if (!document.hidden || !from) return;
	navigator.locks?.request("dlqd-own", { signal }, () => new Promise((release) => {
		const stream = new EventSource(from);
		stream.addEventListener("own", (event) => { show(event.data, "own"); hiddenPages.postMessage(event.data); });
		const end = () => { stream.close(); release(undefined); };
		for (const last of ["ended", "refused"]) stream.addEventListener(last, end);
		stream.addEventListener("error", () => { if (stream.readyState === EventSource.CLOSED) end(); });
		signal.addEventListener("abort", end);
	})).catch(() => {}); // it became visible before it had the lock
}
document.addEventListener("visibilitychange", listenHidden);
addEventListener("pagehide", () => listening.abort());

/** @param {Element} old @param {Element} fresh */
function showRows(old, fresh) {
	const rows = new Map(all("[data-id]", old).map((row) => [row.dataset.id, row]));
	let waiting = 0, trailing = 0, last = -1; // trailing: the new rows after the last row that is shown
	const order = [...rows.keys()], matches = new Set();
	for (const row of all("[data-id]", fresh)) {
		const there = rows.get(row.dataset.id);
		if (!there) {
			waiting++;
			trailing++;
		} else {
			trailing = 0;
			matches.add(row.dataset.id);
			last = Math.max(last, order.indexOf(row.dataset.id));
			const pick = /** @type {HTMLInputElement | null} */ (one("input[name=id]", there)), now = /** @type {HTMLInputElement | null} */ (one("input[name=id]", row));
			if (pick && now) pick.dataset.status = now.dataset.status;
			const cells = all("[data-cell]", row);
			const state = one(".mark .hide", row)?.textContent;
			if (state && state !== one(".mark .hide", there)?.textContent) announcement.textContent = `${one("a", row)?.textContent?.trim() ?? "a row"}: ${state}`;
			all("[data-cell]", there).forEach((cell, i) => {
				if (cells[i] && cell.innerHTML !== cells[i].innerHTML) replace(cell, cells[i]);
			});
		}
	}
	// A row that is missing above another one is gone. Rows missing at the end may be on the next page now.
	const full = waiting > trailing && matches.size + waiting >= rows.size;
	order.forEach((id, i) => markGone(/** @type {HTMLElement} */ (rows.get(id)), !matches.has(id) && (i < last || !full)));
	announceRows(waiting - (matches.size < rows.size ? trailing : 0)); // some replace rows that are gone
	selected();
}

/**
 * Marks a row that no longer matches, and disables its checkbox.
 * @param {HTMLElement} row @param {boolean} gone
 */
function markGone(row, gone) {
	row.classList.toggle("gone", gone);
	row.title = gone ? "no longer matches" : "";
	const pick = /** @type {HTMLInputElement | null} */ (one("input[name=id]", row));
	if (pick) pick.disabled = gone;
}

/** @param {number} rows */
function announceRows(rows) {
	const more = document.getElementById("new-rows");
	if (!more) return;
	more.hidden = rows === 0;
	if (rows > 0 && more.textContent !== `${rows} new`) announcement.textContent = `${rows} new in the list`;
	more.textContent = `${rows} new`;
}

/** Reports whether a field has text that a reload would lose. */
const hasDraft = () => /** @type {(HTMLInputElement | HTMLTextAreaElement)[]} */ (all("main input:not([type=checkbox]):not([data-filter]):not([data-tree-search]), main textarea")).some(typed);

/** @type {EventSource | undefined} */
let events;
/** @type {number | undefined} */
let retry;
/** @type {number | undefined} */
let reloading;

// A browser has at most six connections to a server, so hidden pages close theirs.
function disconnect() {
	events?.close();
	for (const timer of [staleTimer, retry]) clearTimeout(timer);
	clearInterval(reloading);
}

/** @param {string} address */
function follow(address) {
	disconnect();
	if (document.hidden) return;
	const stream = new EventSource(address);
	events = stream;
	const normal = () => connected(address.includes("?") ? "live" : "not live"); // without live sections, it tells of a sign-out
	let up = normal;
	const alive = () => {
		up();
		clearTimeout(staleTimer);
		staleTimer = setTimeout(() => connected("lost"), 4000); // the server sends an event every second
	};
	stream.addEventListener("open", () => { clearInterval(reloading); up = normal; alive(); });
	stream.addEventListener("page", (event) => { alive(); shownAt = event.lastEventId; show(event.data); });
	stream.addEventListener("same", (event) => { alive(); shownAt = event.data; });
	stream.addEventListener("own", (event) => show(event.data, "own")); // sections of this viewer only
	stream.addEventListener("source", (event) => show(event.data, "source")); // of which time the data is
	stream.addEventListener("beat", alive);
	// The viewer is signed out or has other permissions, or the server does not know: reconnect() finds out.
	// A page that signs out itself is left meanwhile.
	stream.addEventListener("ended", () => { disconnect(); connected("lost"); retry = setTimeout(() => reconnect(address), 500); });
	// The user has too many live pages: this page reloads every minute, unless it has a draft.
	stream.addEventListener("refused", (event) => {
		up = () => connected("trouble", event.data);
		up();
		reloading = setInterval(() => { if (!hasDraft()) location.reload(); }, 60_000);
	});
	stream.addEventListener("trouble", (event) => { alive(); connected("trouble", event.data); });
	stream.addEventListener("error", () => {
		connected("lost");
		if (stream.readyState === EventSource.CLOSED) retry = setTimeout(() => reconnect(address), 2000);
	});
}

/**
 * Opens the stream again after it was refused: the server is not up yet, or the session has ended.
 * @param {string} address
 */
async function reconnect(address) {
	const status = await fetch("/api/whoami").then((answer) => answer.status, () => 0);
	if (document.hidden) return; // the visibilitychange event reconnects
	if (status === 200) return follow(address);
	const signIn = `/sign-in?to=${encodeURIComponent(document.body.dataset.page ?? "/")}`;
	if (status === 401 && !hasDraft()) return location.replace(signIn); // a reload would send the form of its answer again
	if (status === 401 && connection && !one("a", connection)) {
		connected("trouble", "signed out");
		const link = document.createElement("a");
		link.href = signIn;
		link.target = "_blank";
		link.textContent = "sign in";
		connection.append(" ", link);
	}
	retry = setTimeout(() => reconnect(address), 5000);
}

const address = document.body.dataset.events;
if (address) {
	follow(address);
	addEventListener("pageshow", (event) => { if (event.persisted) follow(address); });
	addEventListener("pagehide", disconnect);
	document.addEventListener("visibilitychange", () => document.hidden ? disconnect() : follow(address));
	addEventListener("offline", () => { disconnect(); connected("trouble", "offline"); });
	addEventListener("online", () => follow(address));
}
document.getElementById("new-rows")?.addEventListener("click", () => location.reload());

// A page with revealed data ends after a time. Then only the forms that the user typed into stay.

/** @param {Element} within */
function keepDrafts(within) {
	for (const child of [...within.children]) {
		const fields = /** @type {HTMLInputElement[]} */ (all("input, textarea", child));
		if (!fields.some(typed)) child.remove();
		else if (child.tagName !== "FORM") keepDrafts(child);
	}
}
const secondsLeft = Number(document.body.dataset.secondsLeft ?? 0);
if (secondsLeft > 0) {
	const end = Date.now() + secondsLeft * 1000;
	const ending = setInterval(() => { // a timer of this length would stop while the machine sleeps
		if (Date.now() < end) return;
		clearInterval(ending);
		const main = one("main");
		if (hasDraft() && main) keepDrafts(main);
		else location.reload();
	}, 1000);
}

// Selection: a bar with the actions on the selected rows, or on all that match.

const picks = () => /** @type {HTMLInputElement[]} */ (all("input[name=id][type=checkbox]"));
function selected() {
	const chosen = picks().filter((pick) => pick.checked && !pick.disabled);
	const bar = document.getElementById("selection");
	if (!bar) return;
	bar.hidden = chosen.length === 0;
	const count = one("[data-selected]", bar);
	if (count) count.textContent = String(chosen.length);
	for (const pick of picks()) pick.closest("tr")?.setAttribute("aria-selected", String(pick.checked));
	for (const button of /** @type {HTMLButtonElement[]} */ (all("button[data-from]", bar))) {
		const allowed = (button.dataset.from ?? "").split(" ");
		const fits = chosen.filter((pick) => allowed.includes(pick.dataset.status ?? "")).length;
		button.disabled = fits === 0;
		button.title = fits === 0 ? "no selected dead letter is in a state that allows this" : "";
		const number = one("[data-count]", button);
		if (number) number.textContent = fits ? String(fits) : "";
	}
}
/** @type {HTMLInputElement | undefined} */
let lastPick;
document.addEventListener("click", (event) => {
	const pick = event.target;
	if (!(pick instanceof HTMLInputElement) || pick.type !== "checkbox") return;
	if (pick.dataset.all !== undefined) for (const other of picks()) other.checked = pick.checked;
	if (pick.name === "id") {
		const list = picks();
		if (event.shiftKey && lastPick) {
			const [a, b] = [list.indexOf(lastPick), list.indexOf(pick)].sort((x, y) => x - y);
			for (const between of list.slice(a, b + 1)) between.checked = pick.checked;
		}
		lastPick = pick;
	}
	selected();
});
selected();

// Filter completion.

const filter = /** @type {HTMLInputElement | null} */ (one("input[data-filter]"));
if (filter) {
	const list = document.createElement("ul");
	list.className = "completions";
	list.id = "completions";
	list.setAttribute("role", "listbox");
	list.hidden = true;
	filter.closest("form")?.append(list);
	filter.setAttribute("role", "combobox");
	filter.setAttribute("aria-controls", list.id);
	filter.setAttribute("aria-expanded", "false");
	filter.setAttribute("aria-autocomplete", "list");
	let at = -1;
	/** @type {AbortController | undefined} */
	let asked;
	/** @param {number} to */
	const choose = (to) => {
		at = to;
		const items = all("li", list);
		items.forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
		if (at < 0) return filter.removeAttribute("aria-activedescendant");
		filter.setAttribute("aria-activedescendant", items[at].id);
		items[at].scrollIntoView({ block: "nearest" });
	};
	const close = () => { asked?.abort(); list.hidden = true; filter.setAttribute("aria-expanded", "false"); choose(-1); };
	// The list belongs to a text. While the completions of a newer text load, none can be chosen.
	const current = () => !list.hidden && list.dataset.for === filter.value;
	// The API counts in characters, a text field in UTF-16.
	let [from, to] = [0, 0];
	/** @param {HTMLElement} item */
	const take = (item) => {
		if (!current()) return;
		const characters = [...filter.value], text = item.dataset.text ?? "";
		const before = characters.slice(0, from).join("") + text;
		filter.value = before + characters.slice(to).join("");
		filter.setSelectionRange(before.length, before.length);
		close();
		if (text.endsWith(":")) complete();
	};
	const complete = async () => {
		asked?.abort();
		asked = new AbortController();
		choose(-1);
		const { signal } = asked, text = filter.value;
		const cursor = [...text.slice(0, filter.selectionStart ?? text.length)].length;
		try {
			const answer = await fetch(`/api/dlq/filter?q=${encodeURIComponent(text)}&at=${cursor}`, { signal });
			if (!answer.ok) return close();
			/** @type {{from: number, to: number, completions: {insert: string, name: string, doc?: string}[]}} */
			const reading = await answer.json();
			if (signal.aborted) return;
			[from, to] = [reading.from, reading.to];
			list.dataset.for = text;
			list.replaceChildren(...reading.completions.map((completion, i) => {
				const item = document.createElement("li"), name = document.createElement("b"), hint = document.createElement("span");
				item.id = `completion-${i}`;
				item.setAttribute("role", "option");
				item.dataset.text = completion.insert;
				name.textContent = completion.name;
				hint.textContent = completion.doc ?? "";
				item.append(name, hint);
				item.addEventListener("mousedown", (event) => { event.preventDefault(); take(item); });
				return item;
			}));
			list.hidden = reading.completions.length === 0;
			filter.setAttribute("aria-expanded", String(!list.hidden));
		} catch (error) {
			if (!(error instanceof DOMException)) throw error;
		}
	};
	filter.addEventListener("input", complete);
	filter.addEventListener("focus", complete);
	filter.addEventListener("blur", close);
	filter.addEventListener("keydown", (event) => {
		const items = all("li", list);
		if (event.key === "Escape") { if (list.hidden) filter.blur(); else close(); }
		if (!current()) return;
		if (event.key === "ArrowDown" || event.key === "ArrowUp") {
			event.preventDefault();
			choose(event.key === "ArrowDown" ? (at + 1) % items.length : (Math.max(at, 0) + items.length - 1) % items.length);
		}
		if ((event.key === "Enter" || event.key === "Tab") && at >= 0) { event.preventDefault(); take(items[at]); }
	});
}

// Search in the payload's tree. Matches are marked. Closed nodes around them are opened, and closed again by the
// next search.

const treeSearch = /** @type {HTMLInputElement | null} */ (one("input[data-tree-search]"));
if (treeSearch) {
	const bar = /** @type {HTMLElement} */ (treeSearch.parentElement), tree = /** @type {HTMLElement} */ (bar.nextElementSibling);
	const count = /** @type {HTMLElement} */ (one("[data-found-count]", bar));
	/** @type {HTMLElement[]} */
	let hits = [];
	/** @type {HTMLDetailsElement[]} */
	let opened = [];
	let at = -1;
	bar.hidden = false;
	/** @param {number} to */
	const go = (to) => {
		hits[at]?.classList.remove("now");
		at = hits.length ? (to + hits.length) % hits.length : -1;
		hits[at]?.classList.add("now");
		hits[at]?.scrollIntoView({ block: "nearest" });
		const more = one(".left", tree) ? " in the part shown" : "";
		count.textContent = !treeSearch.value.trim() ? "" : hits.length ? `${at + 1} of ${hits.length}${more}` : `no match${more}`;
	};
	const search = () => {
		for (const hit of hits) hit.classList.remove("hit", "now");
		for (const node of opened) node.open = false;
		const text = treeSearch.value.trim().toLowerCase();
		hits = text ? all(".key, .value", tree).filter((part) => part.textContent?.toLowerCase().includes(text)) : [];
		opened = [];
		for (const hit of hits) {
			hit.classList.add("hit");
			// (The key of a closed node is visible.)
			const inside = hit.parentElement?.matches("summary") ? hit.closest("details")?.parentElement : hit;
			for (let node = inside?.closest("details"); node && tree.contains(node); node = node.parentElement?.closest("details")) {
				if (!node.open) {
					node.open = true;
					opened.push(node);
				}
			}
		}
		go(0);
	};
	treeSearch.addEventListener("input", search);
	treeSearch.addEventListener("keydown", (event) => {
		if (event.key !== "Enter") return;
		event.preventDefault();
		go(at + (event.shiftKey ? -1 : 1));
	});
	for (const button of all("button", bar)) button.addEventListener("click", () => go(at + Number(button.dataset.step)));
}

// Look up: Ctrl K opens a box, which shows what the search page finds. The arrows go through it.

const look = /** @type {HTMLDialogElement | null} */ (document.getElementById("look"));
const lookLink = one("[data-look]");
if (look && lookLink) {
	const field = /** @type {HTMLInputElement} */ (one("input", look)), results = /** @type {HTMLElement} */ (one("[data-found]", look));
	/** @type {AbortController | undefined} */
	let asked;
	/** @type {number | undefined} */
	let soon;
	const find = async () => {
		asked?.abort();
		asked = new AbortController();
		if (!field.value.trim()) return results.replaceChildren();
		const { signal } = asked;
		const answer = await fetch(`/search?list=1&q=${encodeURIComponent(field.value)}`, { signal, headers: { Accept: "text/html" } }).catch(() => null);
		if (!answer?.ok || signal.aborted) return;
		const page = new DOMParser().parseFromString(await answer.text(), "text/html");
		if (!signal.aborted) results.replaceChildren(...document.importNode(/** @type {Element} */ (page.getElementById("found")), true).childNodes);
	};
	const start = () => { if (!look.open) look.showModal(); field.select(); };
	lookLink.addEventListener("click", (event) => { event.preventDefault(); start(); });
	field.addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(find, 200); });
	look.addEventListener("keydown", (event) => {
		const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
		if (!step) return;
		event.preventDefault();
		const stops = [field, ...all("a", results)];
		stops[(stops.indexOf(/** @type {HTMLElement} */ (document.activeElement)) + step + stops.length) % stops.length].focus();
	});
	document.addEventListener("keydown", (event) => {
		if (!(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey || event.key.toLowerCase() !== "k" || keys?.open) return;
		event.preventDefault();
		start();
	});
}

// Keyboard shortcuts.

const searched = filter ?? treeSearch;

const keys = /** @type {HTMLDialogElement | null} */ (document.getElementById("keys"));
const keysButton = /** @type {HTMLElement | null} */ (one("[data-keys]"));
if (keysButton) {
	keysButton.hidden = false;
	keysButton.addEventListener("click", () => keys?.showModal());
}

/** @param {number} step */
function move(step) {
	const rows = all("[data-row]");
	if (rows.length === 0) return;
	const now = rows.findIndex((row) => row.classList.contains("cursor"));
	const next = now < 0 ? 0 : Math.min(Math.max(now + step, 0), rows.length - 1);
	rows[now]?.classList.remove("cursor");
	rows[next].classList.add("cursor");
	rows[next].scrollIntoView({ block: "nearest" });
	/** @type {HTMLElement | null} */ (one("a", rows[next]))?.focus({ preventScroll: true });
}

/** @param {string} key */
function press(key) {
	const target = one(`main [data-key="${CSS.escape(key)}"]`);
	if (target instanceof HTMLDetailsElement) {
		target.open = true;
		/** @type {HTMLElement | null} */ (one("textarea, input, button", target))?.focus();
	} else if (target instanceof HTMLInputElement) target.focus();
	else if (target instanceof HTMLElement) target.click();
	return target !== null;
}

let afterG = false;
document.addEventListener("keydown", (event) => {
	const target = event.target;
	if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
	if (target instanceof HTMLElement && target.matches("input:not([type=checkbox]), textarea, select")) {
		if (event.key === "Escape") target.blur();
		return;
	}
	const row = one("[data-row].cursor");
	if (event.repeat && event.key !== "j" && event.key !== "k") return;
	if (afterG) {
		afterG = false;
		const to = one(`.rail [data-key="${CSS.escape(event.key)}"]`);
		if (to instanceof HTMLAnchorElement) { event.preventDefault(); to.click(); }
		return;
	}
	switch (event.key) {
		case "g": afterG = true; return;
		case "?": keys?.showModal(); break;
		case "/": if (!searched) return; searched.focus(); searched.select(); break;
		case "j": move(1); break;
		case "k": move(-1); break;
		case "x": if (row) /** @type {HTMLElement | null} */ (one("input[type=checkbox]", row))?.click(); break;
		case "Enter": if (!row || target !== document.body) return; /** @type {HTMLElement | null} */ (one("a", row))?.click(); break;
		case ".": /** @type {HTMLElement | null} */ (one("#act button:not(:disabled), #selection:not([hidden]) button:not(:disabled)") ?? one("#act-on summary"))?.focus(); break;
		case "u": /** @type {HTMLElement | null} */ (one(".flash button"))?.click(); break;
		default: if (event.key.length !== 1 || !press(event.key)) return;
	}
	event.preventDefault();
});

// After an action, the focus returns to where it was: to the button, if it can be pressed again, or to the nearest
// section that is still there. A review shows another entry then, so the section has the focus, and no key decides about
// an entry that was not read. Without a script, the fragment of the form's address leads back to the section. With one,
// the page stays at its top, where the result of the action is.

const focusKept = "dlqd-focus";
document.addEventListener("submit", (event) => {
	const by = event.submitter ?? document.activeElement, form = event.target;
	if (!(form instanceof HTMLFormElement) || form.method !== "post" || !(by instanceof HTMLElement)) return;
	const near = [];
	for (let part = by.closest("[id]:not(main)"); part; part = part.parentElement?.closest("[id]:not(main)") ?? null) near.push(part.id);
	if (near.length === 0) return;
	sessionStorage.setItem(focusKept, JSON.stringify({ page: location.pathname, near, name: by.getAttribute("name"), value: by.getAttribute("value"), at: Date.now() }));
	if (!("result" in form.dataset)) form.setAttribute("action", (form.getAttribute("action") ?? "").replace(/#.*/, ""));
});
{
	/** @type {{page: string, near: string[], name: string | null, value: string | null, at: number} | null} */
	const kept = JSON.parse(sessionStorage.getItem(focusKept) ?? "null");
	sessionStorage.removeItem(focusKept);
	const fits = kept && kept.page === location.pathname && Date.now() - kept.at < 60_000;
	const near = fits ? kept.near?.map((id) => document.getElementById(id)).find((part) => part) : null;
	const restore = () => {
		const active = document.activeElement;
		if (!kept || !near || active && active !== document.body && active !== near) return;
		for (let part = near.closest("details"); part; part = part.parentElement?.closest("details") ?? null) part.open = true;
		const same = location.pathname === "/review" || near.id !== kept.near[0] ? undefined : all("button, input", near).find((field) =>
			field.getAttribute("name") === kept.name && field.getAttribute("value") === kept.value &&
			!(/** @type {HTMLButtonElement} */ (field).disabled) && field.checkVisibility());
		focusOn(same ?? /** @type {HTMLElement | null} */ (one("summary.button", near)) ?? near);
	};
	restore();
	// If the address has a fragment, the browser takes the focus away once the page is laid out.
	if (location.hash) addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(restore)));
}

// A form is not submitted twice.
document.addEventListener("submit", (event) => {
	const form = event.target;
	if (!(form instanceof HTMLFormElement) || form.method !== "post" || one("input[name=preview]", form)) return;
	if ("sent" in form.dataset) event.preventDefault();
	form.dataset.sent = "";
});
addEventListener("pageshow", () => { for (const form of all("form[data-sent]")) delete form.dataset.sent; });

// A row of tabs that is wider than a phone begins at the current one.
for (const tab of all(".tabs [aria-current]")) {
	const row = tab.closest(".tab-row") ?? tab.closest(".tabs");
	if (row) row.scrollLeft += tab.getBoundingClientRect().right - row.getBoundingClientRect().right + 16;
}
