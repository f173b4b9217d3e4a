/** What Python writes into a page of an explorer (explore.py), and what its modules share. */

import type { Choice, Piece, Plain, Whole } from "../../views/js/types.d.ts";

/** The steps of a run, as far as two runs are compared by them. */
export interface Gradients {
  of: unknown;
  rows: Plain[][];
  exact: boolean;
  steps: number;
  end: boolean;
}

/** A recorded run of an explorer; `whole` is put together when it is first shown. */
export interface Run {
  data?: number[];
  whole?: Whole;
  error?: string;
  /** What is said while there is no run yet. */
  waits?: string;
  figures?: [string, string][];
  grad?: Gradients;
  /** Whether `check` calls it healthy. */
  right?: number;
}

/**
 * The runs of an explorer, and the right one that is nearest to a choice; `other` makes the field for a value that was
 * not recorded, where a kernel can record it.
 */
export interface Runs {
  at(choice: Choice): Run;
  right(choice: Choice): Choice | null;
  other?(name: string, choose: (value: string) => void): HTMLElement;
}

export interface Control {
  name: string;
  kind: "fixed" | "switch" | "slider" | "select" | "tabs";
  labels: string[];
}

/** What an explorer is told. */
export interface ExplorerData {
  controls: Control[];
  grid: number[];
  runs: Run[];
  parts: Record<string, unknown[]>;
  start: Choice;
  against: Choice | null;
}

/** An explorer's run, and the run behind it. */
export interface Shown {
  a: Choice;
  b: Choice | null;
}

/** What happened, on which line; what is in `.grad`, as fractions of a large batch's, and its number. */
export type OpeningEvent = [string, number, number[], string, string];

/** What the opening is told; of each rate three runs: whole, divided, undivided. */
export interface OpeningData {
  code: [number, ...Piece[]][];
  token: string;
  rates: string[];
  start: number;
  ground: [string, Record<string, string | number>, string?][];
  runs: { way: [number, number, number, string][]; events: OpeningEvent[]; from: string; to: string; fails: boolean }[][];
}

/** A box: its lane, its name and its look; left and width as percentages of the axis, top and height of the lane; words. */
export type OverlapMark = [number, string, string, number, number, number, number, string, string];

/** What the lanes of two ranks are told; of each bucket size a window without `no_sync`, and one with it. */
export interface OverlapData {
  caps: number[];
  start: [number, number];
  lanes: [string, string][];
  legend: [string, string][];
  runs: { says: string; marks: OverlapMark[] }[][];
}

/** What the stripes of shards are told: both switches at the start, and a run for each of their positions. */
export interface ShardingData {
  start: [number, number];
  runs: { says: string; phases: number[]; paths: string[]; moments: string[] }[];
}

/** What the streams are told: of each axis its name, how it is written and how many values; a row for each run. */
export interface StreamsData {
  names: string[];
  axes: [string, string, number][];
  start: number[];
  rows: number[][];
}

/** After one operation: its name, the phase, the micro-batch (0: none), and the bytes of each kind. */
export type Moment = [string, string, number, number[]];

/** What the picture of memory is told: the moments of each K's step, without checkpoints and with them. */
export interface PeaksData {
  kinds: string[];
  ks: number[];
  gpu: number;
  runs: Moment[][][];
}

/** What the plumbing is told: a run for each setting of the taps, as binary digits, and the samples of each game. */
export interface PlumbingData {
  runs: { says: string; pipes: number[]; levels: number[]; numbers: string[]; game: number }[];
  rounds: number[];
  games: [number, number][][][];
}
