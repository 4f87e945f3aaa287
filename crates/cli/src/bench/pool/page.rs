//! The page for the browser: what each allocator held over time. One file, no scripts, nothing loaded.

use std::fmt::Write as _;

use ebb_lab::pool::mix::DAY_NS;
use ebb_lab::pool::timeline::{Point, Timeline};

use super::table::{amount, cells, facts, short};
use super::{Replayed, Row};

/// Of a chart, in its own units.
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 260.0;
/// Left of it for figures, right of it, above, and below for the axis.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;
/// Columns of a chart that a line is drawn for.
const COLUMNS: usize = 880;

/// Colours that the colour-blind tell apart, light on dark and dark on light.
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f", "#6a3d9a",
];

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2024;--faint:#6b7480;--line:#d9dee3;--live:#c9d3dc;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--faint:#9aa4ae;--line:#343b42;--live:#3d4852;--paper:#15181b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:980px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2.5rem 0 0;overflow-wrap:anywhere}
p{margin:.2rem 0;color:var(--faint)}svg{width:100%;height:auto;display:block;margin-top:.6rem}
svg text{font:12px system-ui,sans-serif;fill:var(--faint)}svg .name{fill:var(--ink);font-weight:600}
.grid{stroke:var(--line);stroke-width:1}.live{fill:var(--live)}.held{fill:none;stroke-width:1.4;stroke-linejoin:round}
.first{stroke-width:2.4}
.scroll{overflow-x:auto}table{border-collapse:collapse;margin:.8rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .8rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left;padding-left:0}th{font-weight:600;color:var(--faint)}
i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.5rem;vertical-align:-1px}
";

pub(super) fn page(done: &[Replayed]) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>ebb bench pool</title>\n<style>\n{STYLE}</style>\n<h1>Allocators on recorded traces</h1>\n\
         <p>What each holds of the card, and what the program asked for (the grey area).</p>\n"
    );
    for replayed in done {
        section(replayed, &mut page);
    }
    page.push_str("</html>\n");
    page
}

fn section(replayed: &Replayed, page: &mut String) {
    let _ = writeln!(page, "<section>\n<h2>{}</h2>", escaped(&short(&replayed.name)));
    for fact in facts(replayed) {
        let _ = writeln!(page, "<p>{}</p>", escaped(&fact));
    }
    table(replayed, page);
    let Some(first) = replayed.rows.first() else {
        return;
    };
    let x = Axis::of(&first.outcome.timeline, replayed.by_time);
    // Ours is drawn last, above the others.
    let lines: Vec<Line> = replayed
        .rows
        .iter()
        .enumerate()
        .rev()
        .map(|(n, row)| line(row, n, &x, |p| p.physical))
        .collect();
    let live = line(first, 0, &x, |p| p.live);
    chart("held", Some(&live), &lines, &x, page);
    let beyond = |p: &Point| p.physical.saturating_sub(p.live);
    let lines: Vec<Line> = replayed
        .rows
        .iter()
        .enumerate()
        .rev()
        .map(|(n, row)| line(row, n, &x, beyond))
        .collect();
    chart("held beyond live", None, &lines, &x, page);
    page.push_str("</section>\n");
}

fn table(replayed: &Replayed, page: &mut String) {
    let headings = [
        "policy",
        "peak physical",
        "over live",
        "map calls",
        "in 2nd half",
        "ns/op",
        "refused",
        "for no reason",
    ];
    page.push_str("<div class=\"scroll\"><table><tr>");
    let cells = cells(replayed);
    for heading in &headings[..cells.first().map_or(0, Vec::len)] {
        let _ = write!(page, "<th>{heading}</th>");
    }
    page.push_str("</tr>\n");
    for (number, row) in cells.iter().enumerate() {
        page.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            // What was recorded has no line.
            let mark = if column == 0 && number < replayed.rows.len() {
                format!("<i style=\"background:{}\"></i>", colour(number))
            } else {
                String::new()
            };
            let _ = write!(page, "<td>{mark}{}</td>", escaped(cell));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
}

fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// The way from left to right.
struct Axis {
    by_time: bool,
    /// The last event or nanosecond.
    end: f64,
}

impl Axis {
    fn of(timeline: &Timeline, by_time: bool) -> Self {
        let events = timeline.points().len() as u64 * timeline.stride();
        let end = if by_time { DAY_NS } else { events };
        Self {
            by_time,
            end: end.max(1) as f64,
        }
    }

    /// In columns.
    fn column(&self, timeline: &Timeline, number: usize, point: &Point) -> usize {
        let at = if self.by_time {
            point.at_ns as f64
        } else {
            number as f64 * timeline.stride() as f64
        };
        ((at / self.end * COLUMNS as f64) as usize).min(COLUMNS - 1)
    }

    fn marks(&self) -> Vec<(f64, String)> {
        if self.by_time {
            return (0..=6)
                .map(|n| (f64::from(n) / 6.0, format!("{} h", n * 4)))
                .collect();
        }
        let step = nice(self.end / 5.0);
        let marks = (0..)
            .map(|n| f64::from(n) * step)
            .take_while(|&at| at <= self.end);
        marks
            .map(|at| {
                (
                    at / self.end,
                    if at == 0.0 {
                        "event 0".into()
                    } else {
                        format!("{at:.0}")
                    },
                )
            })
            .collect()
    }
}

/// The next of 1, 2, 5 times a power of ten: round numbers for people. From 1 on.
fn nice(least: f64) -> f64 {
    let mut power = 1.0;
    while power * 10.0 <= least {
        power *= 10.0;
    }
    let step = [1.0, 2.0, 5.0]
        .into_iter()
        .map(|step| step * power)
        .find(|&step| step >= least);
    step.unwrap_or(power * 10.0)
}

/// The most in each column; columns without an event are as the one before.
struct Line {
    name: &'static str,
    colour: &'static str,
    ours: bool,
    columns: Vec<u64>,
}

fn line(row: &Row, number: usize, x: &Axis, of: impl Fn(&Point) -> u64) -> Line {
    let timeline = &row.outcome.timeline;
    let mut most = vec![None; COLUMNS];
    for (n, point) in timeline.points().iter().enumerate() {
        let column = &mut most[x.column(timeline, n, point)];
        *column = (*column).max(Some(of(point)));
    }
    let mut last = 0;
    let columns = most.into_iter().map(|value| {
        last = value.unwrap_or(last);
        last
    });
    Line {
        name: row.kind.name(),
        colour: colour(number),
        ours: number == 0,
        columns: columns.collect(),
    }
}

fn chart(name: &str, live: Option<&Line>, lines: &[Line], x: &Axis, page: &mut String) {
    let all = lines.iter().chain(live).flat_map(|line| &line.columns);
    let highest = all.copied().max().unwrap_or(0).max(1) as f64;
    // Ticks are round in the unit that their figures have.
    let mut unit = 1.0;
    while highest / unit >= 10.0 * 1024.0 {
        unit *= 1024.0;
    }
    let step = nice(highest / unit / 4.0) * unit;
    let top = (highest / step).ceil() * step;
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let place_x = |part: f64| LEFT + part * (right - LEFT);
    let place_y = |bytes: f64| bottom - bytes / top * (bottom - TOP);
    let _ = writeln!(
        page,
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{name}\">"
    );
    let mut tick = 0.0;
    while tick <= top * 1.001 {
        let y = place_y(tick);
        let text = if tick == 0.0 {
            "0".into()
        } else {
            amount_round(tick as u64)
        };
        let _ = writeln!(
            page,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT - 8.0,
            y + 4.0
        );
        tick += step;
    }
    for (part, text) in x.marks() {
        let anchor = if part > 0.97 {
            "end"
        } else if part < 0.02 {
            "start"
        } else {
            "middle"
        };
        let _ = writeln!(
            page,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{text}</text>",
            place_x(part),
            HEIGHT - 8.0
        );
    }
    let path = |line: &Line| {
        let mut d = String::new();
        let mut before = None;
        for (column, &bytes) in line.columns.iter().enumerate() {
            if before == Some(bytes) {
                continue;
            }
            let (at, y) = (place_x(column as f64 / COLUMNS as f64), place_y(bytes as f64));
            let _ = match before {
                None => write!(d, "M{at:.1} {y:.1}"),
                Some(_) => write!(d, "H{at:.1}V{y:.1}"),
            };
            before = Some(bytes);
        }
        let _ = write!(d, "H{right}");
        d
    };
    if let Some(live) = live {
        let _ = writeln!(
            page,
            "<path class=\"live\" d=\"{}V{bottom}H{LEFT}Z\"><title>live</title></path>",
            path(live)
        );
    }
    for line in lines {
        let class = if line.ours { "held first" } else { "held" };
        let _ = writeln!(
            page,
            "<path class=\"{class}\" stroke=\"{}\" d=\"{}\"><title>{}</title></path>",
            line.colour,
            path(line),
            line.name
        );
    }
    let _ = writeln!(
        page,
        "<text class=\"name\" x=\"{}\" y=\"{}\">{name}</text>\n</svg>",
        LEFT + 8.0,
        TOP + 14.0
    );
}

/// For a tick, which is round already.
fn amount_round(bytes: u64) -> String {
    let text = amount(bytes);
    match text.split_once(' ') {
        Some((figure, unit)) if figure.contains('.') => {
            format!("{} {unit}", figure.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text,
    }
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::super::tests::replayed;
    use super::*;

    #[test]
    fn the_page_loads_nothing_and_obeys_no_name() {
        let mut one = replayed();
        one.name = "a<script>&\u{7}.csv".into();
        let page = page(&[one, replayed()]);
        assert_eq!(page.matches("<svg").count(), 4);
        assert!(page.contains("&lt;script&gt;"), "{page}");
        for bad in [
            "<script", "http:", "https:", "src=", "@import", "url(", "NaN", "inf", "\u{7}",
        ] {
            assert!(!page.contains(bad), "{bad}");
        }
        for row in replayed().rows {
            assert!(page.contains(&format!("<title>{}</title>", row.kind.name())));
        }
        // Every tag that is opened is closed, and in order.
        let mut open = Vec::new();
        for rest in page.split('<').skip(1) {
            let tag = rest.split('>').next().unwrap();
            let name = tag.split([' ', '\n']).next().unwrap();
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name)),
                None if ["!doctype", "meta"].contains(&name) || tag.ends_with('/') => {}
                None => open.push(name),
            }
        }
        assert_eq!(open, Vec::<&str>::new());
    }

    #[test]
    fn figures_on_axes_are_round() {
        let nice: Vec<f64> = [0.1, 1.0, 1.1, 4.0, 5.1, 1725.0, 60_000.0]
            .into_iter()
            .map(nice)
            .collect();
        assert_eq!(nice, [1.0, 1.0, 2.0, 5.0, 10.0, 2000.0, 100_000.0]);
        assert_eq!(amount_round(2000 << 20), "2000 MiB");
        assert_eq!(amount_round(50 << 30), "50 GiB");
    }
}
