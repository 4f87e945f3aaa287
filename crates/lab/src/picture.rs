//! Pictures of a run: memory over time by task, who ran and who waited, policies side by side. SVG, for a page or an image.

use std::fmt::Write;

use ebb_units::Bytes;

use crate::chart::{Chart, escaped, label};
use crate::cluster::{Job, Outcome, Policy, State, Timeline};

/// Width of every picture.
pub const WIDTH: f64 = 960.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 74.0;
const BOTTOM: f64 = 50.0;
/// Told apart by those who see few colours, and in grey by their brightness.
const COLOURS: [&str; 10] = [
    "#4477aa", "#ee8866", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#77aadd", "#99ddff", "#44bb99",
    "#bbcc33",
];
/// Jobs without a colour of their own.
const OTHERS: &str = "#b0b0b0";
const WAITING: &str = "#cc3311";
const INK: &str = "#222";
/// The most jobs that get a colour, and the most that get a lane.
const COLOURED: usize = COLOURS.len();
const LANES: usize = 28;

/// One picture.
#[derive(Clone, Debug, PartialEq)]
pub enum Picture {
    /// Lines.
    Chart(Chart),
    /// Bytes of each job on the cards, on top of each other.
    Memory(Memory),
    /// What each job did.
    Lanes(Lanes),
    /// One figure for each policy.
    Bars(Bars),
}

/// Bytes on the cards over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    title: String,
    from: f64,
    to: f64,
    /// Bytes of the cards, GiB.
    there: f64,
    /// Name and bytes (seconds, GiB; each holds until the next).
    jobs: Vec<(String, Vec<(f64, f64)>)>,
}

/// What jobs did over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Lanes {
    title: String,
    from: f64,
    to: f64,
    /// Name, place of the colour, and what it did.
    jobs: Vec<(String, usize, crate::cluster::Lane)>,
    /// Jobs in all.
    all: usize,
}

/// A figure of each policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Bars {
    /// What it shows.
    pub title: String,
    /// Name, figure, and how it is written.
    pub bars: Vec<(String, f64, String)>,
}

fn gib(bytes: Bytes) -> f64 {
    bytes.0 as f64 / Bytes::gib(1).0 as f64
}

/// Seconds as a person divides them: a unit, and how many seconds it has.
fn unit(span: f64) -> (&'static str, f64) {
    if span >= 3.0 * 3600.0 {
        ("hours", 3600.0)
    } else if span >= 600.0 {
        ("minutes", 60.0)
    } else {
        ("seconds", 1.0)
    }
}

/// Steps of an axis: about so many.
fn ticks(low: f64, high: f64, about: f64) -> Vec<f64> {
    let rough = ((high - low) / about).max(1e-9);
    let decade = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * decade)
        .find(|s| *s >= rough * 0.999)
        .unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    (first..)
        .map(|n| n as f64 * step)
        .take_while(|v| *v <= high * 1.000_001)
        .collect()
}

/// A name that fits its place.
fn short(name: &str, most: usize) -> String {
    if name.chars().count() <= most {
        return name.to_owned();
    }
    let head: String = name.chars().take(most - 1).collect();
    format!("{}…", head.trim_end())
}

/// Jobs by the bytes that they have over time, most first.
fn by_weight(timeline: &Timeline, to: f64) -> Vec<usize> {
    let weight = |n: usize| -> f64 {
        let r = &timeline.lanes[n].resident;
        let ends = r.iter().skip(1).map(|p| p.0).chain([to]);
        r.iter()
            .zip(ends)
            .map(|(p, end)| gib(p.1) * (end - p.0).max(0.0))
            .sum()
    };
    let mut all: Vec<(f64, usize)> = (0..timeline.lanes.len()).map(|n| (weight(n), n)).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    all.into_iter().map(|(_, n)| n).collect()
}

/// The pictures of a run with ebb: memory, and what the jobs did. None if the run kept no timeline.
#[must_use]
pub fn of_run(jobs: &[Job], out: &Outcome, cards: usize, card: Bytes, policy: Policy) -> Vec<Picture> {
    let timeline = &out.timeline;
    if timeline.lanes.is_empty() {
        return Vec::new();
    }
    let from = jobs.iter().map(|j| j.arrives).fold(f64::INFINITY, f64::min);
    let from = if from.is_finite() { from } else { 0.0 };
    let to = from + out.makespan.max(1e-3);
    let mut coloured = by_weight(timeline, to);
    coloured.truncate(COLOURED);
    coloured.sort_unstable();
    let points = |n: usize| -> Vec<(f64, f64)> {
        let r = timeline.lanes[n].resident.iter();
        r.map(|(at, bytes)| (*at, gib(*bytes))).collect()
    };
    let mut memory: Vec<(String, Vec<(f64, f64)>)> = coloured
        .iter()
        .map(|n| (jobs[*n].name.clone(), points(*n)))
        .collect();
    let rest: Vec<usize> = (0..jobs.len()).filter(|n| !coloured.contains(n)).collect();
    if !rest.is_empty() {
        memory.push((format!("{} others", rest.len()), sum_of(timeline, &rest)));
    }
    let mut lanes: Vec<usize> = (0..jobs.len()).collect();
    if lanes.len() > LANES {
        // Those to whom most happened.
        let happened = |n: usize| timeline.lanes[n].stops.len() * 1000 + timeline.lanes[n].spans.len();
        lanes.sort_by_key(|n| (core::cmp::Reverse(happened(*n)), *n));
        lanes.truncate(LANES);
        lanes.sort_unstable();
    }
    let colour = |n: usize| coloured.iter().position(|c| *c == n).unwrap_or(COLOURED);
    let called = if cards == 1 {
        "one card".to_owned()
    } else {
        format!("{cards} cards")
    };
    vec![
        Picture::Memory(Memory {
            title: format!("Memory of {called}, by task, with {policy}"),
            from,
            to,
            there: gib(card) * cards as f64,
            jobs: memory,
        }),
        Picture::Lanes(Lanes {
            title: format!("What the tasks did, with {policy}"),
            from,
            to,
            jobs: lanes
                .iter()
                .map(|n| (jobs[*n].name.clone(), colour(*n), timeline.lanes[*n].clone()))
                .collect(),
            all: jobs.len(),
        }),
    ]
}

/// Bytes of several jobs together, at each change.
fn sum_of(timeline: &Timeline, jobs: &[usize]) -> Vec<(f64, f64)> {
    let mut changes: Vec<(f64, f64)> = Vec::new();
    for n in jobs {
        let mut before = 0.0;
        for (at, bytes) in &timeline.lanes[*n].resident {
            changes.push((*at, gib(*bytes) - before));
            before = gib(*bytes);
        }
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut now = 0.0;
    changes
        .into_iter()
        .map(|(at, by)| {
            now += by;
            (at, now.max(0.0))
        })
        .collect()
}

impl Picture {
    /// The picture as an SVG element of [`WIDTH`] and [`Self::height`].
    #[must_use]
    pub fn svg(&self) -> String {
        match self {
            Self::Chart(chart) => chart.svg(),
            Self::Memory(memory) => memory.svg(),
            Self::Lanes(lanes) => lanes.svg(),
            Self::Bars(bars) => bars.svg(),
        }
    }

    /// How high it is.
    #[must_use]
    pub fn height(&self) -> f64 {
        match self {
            Self::Chart(_) => crate::chart::HEIGHT,
            Self::Memory(_) => 440.0,
            Self::Lanes(lanes) => lanes.height(),
            Self::Bars(bars) => bars.height(),
        }
    }
}

fn begin(height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\" \
         font-family=\"system-ui, sans-serif\" font-size=\"13\">\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\
         <text x=\"24\" y=\"28\" font-size=\"18\" font-weight=\"600\" fill=\"{INK}\">{}</text>",
        escaped(title)
    )
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, fill: &str, what: &str) {
    let _ = write!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{}</text>",
        escaped(what)
    );
}

fn rect(out: &mut String, x: f64, y: f64, width: f64, height: f64, style: &str) {
    let _ = write!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" {style}/>"
    );
}

/// The axis of time under a picture.
fn time_axis(out: &mut String, from: f64, to: f64, bottom: f64) {
    let (name, unit) = unit(to - from);
    let at = |v: f64| LEFT + (v * unit) / (to - from) * (WIDTH - RIGHT - LEFT);
    for v in ticks(0.0, (to - from) / unit, 8.0) {
        let _ = write!(out, "<path d=\"M{:.1} {bottom:.1}v5\" stroke=\"#888\"/>", at(v));
        text(out, at(v), bottom + 20.0, "middle", "#555", &label(v));
    }
    let _ = write!(
        out,
        "<path d=\"M{LEFT} {bottom:.1}H{:.1}\" stroke=\"#888\"/>",
        WIDTH - RIGHT
    );
    text(
        out,
        (LEFT + WIDTH - RIGHT) / 2.0,
        bottom + 40.0,
        "middle",
        INK,
        name,
    );
}

/// Names with their colours, in as many lines as they need; how far down they go.
fn legend(out: &mut String, entries: &[(String, String)]) -> f64 {
    let (mut x, mut y) = (24.0, 50.0);
    for (name, style) in entries {
        let width = 30.0 + 7.4 * name.chars().count() as f64;
        if x + width > WIDTH - RIGHT {
            (x, y) = (24.0, y + 20.0);
        }
        rect(out, x, y - 10.0, 13.0, 13.0, &format!("rx=\"2\" {style}"));
        text(out, x + 19.0, y + 1.0, "start", INK, name);
        x += width + 6.0;
    }
    y
}

fn colour(place: usize) -> &'static str {
    COLOURS.get(place).copied().unwrap_or(OTHERS)
}

impl Memory {
    fn svg(&self) -> String {
        let height = 440.0;
        let mut out = begin(height, &self.title);
        let entries: Vec<(String, String)> = self
            .jobs
            .iter()
            .enumerate()
            .map(|(n, (name, _))| (short(name, 22), format!("fill=\"{}\"", colour(n))))
            .collect();
        let top = legend(&mut out, &entries) + 24.0;
        let bottom = height - BOTTOM;
        let y = |v: f64| bottom - v / (self.there * 1.04) * (bottom - top);
        for v in ticks(0.0, self.there, 5.0) {
            let _ = write!(
                out,
                "<path d=\"M{LEFT} {:.1}H{:.1}\" stroke=\"#e4e4e4\"/>",
                y(v),
                WIDTH - RIGHT
            );
            text(&mut out, LEFT - 8.0, y(v) + 4.5, "end", "#555", &label(v));
        }
        text(&mut out, LEFT - 70.0, (top + bottom) / 2.0, "end", INK, "GiB");
        // One column for each point of the picture.
        let columns = (WIDTH - RIGHT - LEFT) as usize;
        let at = |c: usize| self.from + (self.to - self.from) * (c as f64 + 0.5) / columns as f64;
        let mut base = vec![0.0; columns];
        for (n, (_, points)) in self.jobs.iter().enumerate() {
            let mut tops = Vec::with_capacity(columns);
            let mut place = 0;
            for (c, base) in base.iter().enumerate() {
                while points.get(place + 1).is_some_and(|p| p.0 <= at(c)) {
                    place += 1;
                }
                let value = points.get(place).filter(|p| p.0 <= at(c)).map_or(0.0, |p| p.1);
                tops.push(base + value);
            }
            let mut path = String::new();
            let mut c = 0;
            // Columns that are alike are one rectangle.
            while c < columns {
                let mut end = c + 1;
                while end < columns && tops[end] == tops[c] && base[end] == base[c] {
                    end += 1;
                }
                if tops[c] > base[c] {
                    let _ = write!(
                        path,
                        "M{:.1} {:.1}H{:.1}V{:.1}H{:.1}Z",
                        LEFT + c as f64,
                        y(tops[c]),
                        LEFT + end as f64,
                        y(base[c]),
                        LEFT + c as f64
                    );
                }
                c = end;
            }
            let _ = write!(
                out,
                "<path d=\"{path}\" fill=\"{}\" shape-rendering=\"crispEdges\"/>",
                colour(n)
            );
            base = tops;
        }
        let _ = write!(
            out,
            "<path d=\"M{LEFT} {0:.1}H{1:.1}\" stroke=\"{INK}\" stroke-dasharray=\"6 4\"/>",
            y(self.there),
            WIDTH - RIGHT
        );
        text(
            &mut out,
            WIDTH - RIGHT,
            y(self.there) - 5.0,
            "end",
            INK,
            &format!("{} GiB there", label(self.there.round())),
        );
        time_axis(&mut out, self.from, self.to, bottom);
        out.push_str("</svg>");
        out
    }
}

impl Lanes {
    fn lane(&self) -> f64 {
        if self.jobs.len() <= 12 { 30.0 } else { 19.0 }
    }

    fn height(&self) -> f64 {
        TOP + self.lane() * self.jobs.len().max(1) as f64 + BOTTOM + 8.0
    }

    fn svg(&self) -> String {
        let height = self.height();
        let title = if self.all > self.jobs.len() {
            format!("{}: {} of {}", self.title, self.jobs.len(), self.all)
        } else {
            self.title.clone()
        };
        let mut out = begin(height, &title);
        let one = "#4477aa";
        legend(
            &mut out,
            &[
                ("runs (its colour)".into(), format!("fill=\"{one}\"")),
                ("idle".into(), format!("fill=\"{one}\" fill-opacity=\".22\"")),
                ("waits for its bytes".into(), format!("fill=\"{WAITING}\"")),
                ("in line".into(), "fill=\"#fff\" stroke=\"#888\"".into()),
                ("\u{25bc} stopped for another".into(), "fill=\"none\"".into()),
            ],
        );
        let bottom = height - BOTTOM;
        let x = |t: f64| {
            let t = t.clamp(self.from, self.to);
            LEFT + (t - self.from) / (self.to - self.from) * (WIDTH - RIGHT - LEFT)
        };
        let lane = self.lane();
        for (n, (name, place, what)) in self.jobs.iter().enumerate() {
            let y = TOP + n as f64 * lane;
            let (bar, middle) = (lane * 0.55, y + lane * 0.62);
            text(&mut out, LEFT - 10.0, middle + 4.5, "end", INK, &short(name, 17));
            let mut paths = [String::new(), String::new(), String::new(), String::new()];
            for span in &what.spans {
                let (a, b) = (x(span.from), x(span.to));
                let least = if span.state == State::Waiting { 1.2 } else { 0.2 };
                let width = (b - a).max(least);
                let (path, inset) = match span.state {
                    State::Idle => (&mut paths[0], 0.0),
                    State::Running => (&mut paths[1], 0.0),
                    State::Queued => (&mut paths[2], bar * 0.35),
                    State::Waiting => (&mut paths[3], 0.0),
                };
                let _ = write!(
                    path,
                    "M{a:.2} {:.2}h{width:.2}v{:.2}h-{width:.2}z",
                    middle - bar / 2.0 + inset,
                    bar - 2.0 * inset
                );
            }
            let own = colour(*place);
            for (path, style) in paths.iter().zip([
                format!("fill=\"{own}\" fill-opacity=\".22\""),
                format!("fill=\"{own}\""),
                "fill=\"#fff\" stroke=\"#888\"".to_owned(),
                format!("fill=\"{WAITING}\""),
            ]) {
                if !path.is_empty() {
                    let _ = write!(out, "<path d=\"{path}\" {style}/>");
                }
            }
            // Marks that would lie on each other are one.
            let mut last = f64::NEG_INFINITY;
            for stop in &what.stops {
                let at = x(*stop);
                if at - last < 4.0 {
                    continue;
                }
                last = at;
                let tip = middle - bar / 2.0 + 1.0;
                let _ = write!(out, "<path d=\"M{at:.1} {tip:.1}l-3.5 -6h7z\" fill=\"{INK}\"/>");
            }
        }
        time_axis(&mut out, self.from, self.to, bottom);
        out.push_str("</svg>");
        out
    }
}

impl Bars {
    fn height(&self) -> f64 {
        54.0 + 30.0 * self.bars.len() as f64 + 10.0
    }

    fn svg(&self) -> String {
        let mut out = begin(self.height(), &self.title);
        let most = self.bars.iter().map(|b| b.1).fold(0.0, f64::max).max(1e-9);
        for (n, (name, value, shown)) in self.bars.iter().enumerate() {
            let y = 46.0 + 30.0 * n as f64;
            text(&mut out, LEFT - 10.0, y + 17.0, "end", INK, &short(name, 17));
            let width = (value / most * (WIDTH - RIGHT - LEFT - 110.0)).max(1.0);
            let fill = if n == 0 { COLOURS[0] } else { "#a9b4c2" };
            rect(
                &mut out,
                LEFT,
                y + 2.0,
                width,
                21.0,
                &format!("rx=\"3\" fill=\"{fill}\""),
            );
            text(&mut out, LEFT + width + 8.0, y + 17.0, "start", INK, shown);
        }
        out.push_str("</svg>");
        out
    }
}

/// One SVG of a title, lines and pictures below each other, and its size.
#[must_use]
pub fn sheet(title: &str, lines: &[String], pictures: &[Picture]) -> (String, f64, f64) {
    // Lines are broken where they would pass the edge.
    let mut shown: Vec<String> = Vec::new();
    for line in lines {
        let mut now = String::new();
        for word in line.split(' ') {
            if !now.is_empty() && now.chars().count() + word.chars().count() > 118 {
                shown.push(std::mem::take(&mut now));
            }
            if !now.is_empty() {
                now.push(' ');
            }
            now.push_str(word);
        }
        shown.push(now);
    }
    let head = 62.0 + 20.0 * shown.len() as f64;
    let gap = 14.0;
    let height = head + pictures.iter().map(|p| p.height() + gap).sum::<f64>();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\"><rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\
         <text x=\"24\" y=\"40\" font-size=\"24\" font-weight=\"700\" fill=\"{INK}\">{}</text>",
        escaped(title)
    );
    for (n, line) in shown.iter().enumerate() {
        let _ = write!(
            out,
            "<text x=\"24\" y=\"{:.1}\" font-size=\"13.5\" fill=\"#444\">{}</text>",
            64.0 + 20.0 * n as f64,
            escaped(line)
        );
    }
    let mut y = head;
    for picture in pictures {
        let _ = write!(out, "<g transform=\"translate(0 {y:.1})\">{}</g>", picture.svg());
        y += picture.height() + gap;
    }
    out.push_str("</svg>");
    (out, WIDTH, height)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{self, Phase, Setting};

    #[test]
    fn a_run_becomes_pictures_that_name_its_jobs() {
        let jobs: Vec<Job> = (0..40)
            .map(|n| Job {
                name: format!("job <{n}>"),
                arrives: f64::from(n),
                priority: ebb_units::Priority::Normal,
                request: Bytes::ZERO,
                limit: None,
                lends: true,
                by_clock: false,
                phases: vec![
                    Phase {
                        seconds: 20.0,
                        bytes: Bytes::gib(30),
                        duty: 0.5,
                    };
                    2
                ],
            })
            .collect();
        let setting = Setting {
            cards: 2,
            timeline: true,
            ..Setting::default()
        };
        let out = cluster::run(&jobs, &setting, Policy::Ebb);
        let pictures = of_run(&jobs, &out, 2, setting.card, Policy::Ebb);
        assert_eq!(pictures.len(), 2);
        let (svg, width, height) = sheet("a & b", &["l".into()], &pictures);
        assert_eq!(width, WIDTH);
        assert!(height > 900.0, "{height}");
        for wanted in [
            "a &amp; b",
            "job &lt;0&gt;",
            "30 others",
            "28 of 40",
            "160 GiB there",
            "in line",
        ] {
            assert!(svg.contains(wanted), "{wanted}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert_eq!(
            of_run(&jobs, &Outcome::default(), 2, setting.card, Policy::Ebb),
            []
        );
    }

    #[test]
    fn names_are_cut_and_axes_have_a_few_steps() {
        assert_eq!(short("a very long name of a job", 10), "a very lo…");
        assert_eq!(ticks(0.0, 10.0, 5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert!(ticks(0.0, 0.0, 5.0).len() < 3);
    }
}
