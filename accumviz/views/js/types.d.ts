/** What Python writes into a page (payload.py, graph.py), and what modules share. */

/** The one state of a player: event, nodes that have run (null: all), selected parameter and node (-1: none). */
export interface At {
  e: number;
  n: number | null;
  p: number;
  node: number;
}

/** The state of a view, to which its host listens. */
export interface Model {
  get(key: string): any;
  set(key: string, value: unknown): void;
  on(name: string, heard: () => void): void;
}

/** What anywidget hands to a view: what is set travels once it is saved. */
export interface Notebook extends Model {
  save_changes(): void;
}

export interface Host {
  model: Model;
  el: HTMLElement;
}

export type Dispose = () => void;

/** A number as JSON can say it: "NaN", "Infinity" and "-Infinity" are texts. */
export type Plain = number | string | null;

/** The events as columns; what most of them lack is a list of positions. */
export interface Events {
  k: number[];
  u: number[];
  h: string[];
  l: number[];
  c: number[];
  retained: number[];
  i?: number[];
  b?: (number | null)[];
  a?: (number | null)[];
  t?: string[];
}

/**
 * A parameter, or a group of neighbouring ones: name, short name, shape, reach, what events erased unused, range of
 * parameters, a gradient scaler's factors, and whether what its `.grad` was before the first event is unknown.
 */
export interface RowData {
  n: string;
  s: string;
  d: number[];
  r: Plain[];
  lost?: Record<number, number[]>;
  in?: [number, number];
  k?: number[];
  u?: number;
}

/** A text, or one with the name of its colour. */
export type Piece = string | [string, string];

export interface Layout {
  w: number;
  h: number;
  n: NodeData[];
  e: [number, number, string, string][];
  notes: string[];
}

/** A card: box, kinds, marks, names of its numbers and where they stand, text, leaf, whether it saves anything. */
export interface NodeData {
  b: [number, number, number, number];
  k: string[];
  m: [string, Record<string, string | number>, string?][];
  n: string[];
  y: number;
  t: string;
  leaf?: string;
  in?: string;
  s?: unknown;
}

/** A backward's graph: layout, values, order of running, factors of edges, whether recording found it. */
export interface GraphData {
  l: number;
  v: string[][];
  order: number[];
  x?: string[];
  made?: unknown;
}

/** What a backward weighs in a step: its place (-1: not shown), where it starts, how long it is, look and text. */
export type Segment = [number, number, number, string, string];

/** The shares of one objective in the step at `e`: its name, its colour's label, what they add to, in words. */
export interface ShareRow {
  e: number;
  o: string;
  l: number;
  t: string;
  w: string;
  s: Segment[];
}

/** All bars of shares, their one scale, the legend: what it says, its swatch, its colour. */
export interface SharesData {
  r: number[];
  rows: ShareRow[];
  keys: string[][];
  note: string;
}

/** Weights after an event (-1: before the first): its place, x, y, in words, an arrow if beyond the edge. */
export type Station = [number, number, number, string, string];

/** The way of one or two weights: the ground below it, what that means, stations; ways of runs beside it. */
export interface WeightsData {
  m: NodeData["m"];
  /** Whether it stands beside the code. */
  leads?: boolean;
  note: string; arrow: string;
  p: Station[];
  name?: string;
  color?: string;
  beside?: { name: string; color: string; p: Station[] }[];
}

/** A mistake: the event to look at, and the place of its line in all code that is shown. */
export interface FindingData {
  rule: string;
  severity: string;
  event: number;
  line: number;
  mark?: number;
  cause: string;
  evidence: string;
  suggestion: string[];
  /** Where to read about it, if that is known; the book knows its own. */
  read: string;
}

export interface ReportData {
  verdict: "healthy" | "findings" | "no verdict";
  said: string;
  findings: FindingData[];
  unjudged?: string[];
  /** Of a recording by itself: which script it is of, when, and how much it holds. */
  about?: string;
}

/** What a player is told. */
export interface Data {
  report?: ReportData;
  about: string;
  note: string;
  /** What ∅ means, if it is there; of kinds of events name, colour, dashes; of columns what stands above them. */
  none: string;
  kinds: [string, string, number[]][];
  heads: [string, string, string][];
  colors: [number, string, string][];
  keys: [string, string, string][];
  e: Events;
  count: number;
  p: RowData[];
  code: { name: string; lines: [number, ...Piece[]][] }[];
  x: Record<string, [(Plain[] | null)[], (Plain[] | null)[]]>;
  digits: number;
  shares?: SharesData;
  weights?: WeightsData;
  /** Norms of contributions and `.grad`; none where `x` has all elements. */
  c?: Plain[];
  g?: Plain[];
  heat?: { w: number; told: string; px: number[] };
  layouts: Layout[];
  graphs: GraphData[];
  of: Record<string, number>;
  /** Why a backward has no graph; empty where none has. */
  missing: string;
  /** What is said before the first event, of its graph; what bars are divided by. */
  before: [string, string];
  bars: string;
  /** Lines of code, by their place, in which the run beside it differs, and how. */
  differs?: Record<number, string>;
  /** The run behind, drawn as an outline. */
  ghost?: Whole;
  /** Of all runs that may come to stand here: most saved bytes, how many events they have. */
  most?: number; sizes?: number[];
  /** How tall a lane of bars is (0: there are none), and its bars. */
  lane: number; lanes: Lanes | { n?: undefined };
  /** Where what no recorded backward put there comes from. */
  unseen: string;
}

/** Row by row: parts of each bar; of parts how many events ago (-1: not recorded), factor or amount, look. */
export interface Lanes { n: number[][]; age: number[][]; by: Plain[][]; look: string[] }

export interface Whole {
  data: Data;
}

/** Per control the place of a recorded value, or the text of another one. */
export type Choice = (number | string)[];

/** A part of `.grad`: which event put it there (-1: none that was recorded), and how much is left of it. */
export interface Part {
  born: number;
  amount: number;
  height: number;
  look: "new" | "live" | "used" | "unseen";
  told?: string;
}

type Tag<N extends string> = N extends `${infer T}.${string}` ? T : N;

/** The element that `h("tag.class")` makes. */
export type Made<N extends string> = Tag<N> extends keyof HTMLElementTagNameMap
  ? HTMLElementTagNameMap[Tag<N>]
  : HTMLElement;

export type Attribute = string | number | boolean | ((event: any) => void);
