/** What Python writes into the page of a lab (lab.py), beside what it writes for a player. */

import type { Data, ReportData } from "../../views/js/types.d.ts";

/** A choice of a lab: its values, what each is called, and the line that it moves ("" for none). */
export interface Offer {
  name: string;
  title: string;
  values: string[];
  labels: string[];
  line: string;
}

/** A line of a lab's loop by its number (0: a place for one), how far in it stands, what is chosen by it, and where. */
export type LabRow = [number, number, string, string];

/** An arrangement's recording, the rows of its loop, and the report on it. */
export type LabRun = Data & { rows: LabRow[]; report: ReportData };

/** What a lab is told: of each run, which of the parts are its own, -1 for none; and whose code is the tallest. */
export interface LabData {
  offers: Offer[];
  start: number[];
  grid: Record<string, number>;
  tallest: number[];
  runs: number[][];
  parts: Record<string, unknown[]>;
}
