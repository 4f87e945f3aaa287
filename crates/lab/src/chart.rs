//! [`Chart`]: a picture of a result as SVG, and a page that holds several of them and needs nothing else.

use std::fmt::Write;

use crate::picture::Picture;

/// Pictures' size.
const WIDTH: f64 = 960.0;
pub(crate) const HEIGHT: f64 = 420.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 74.0;
const BOTTOM: f64 = 52.0;
/// Told apart also by those who see few colours.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line through the points.
    Line,
    /// A line that stays until the next point, filled down to zero.
    Steps,
    /// A line with its points.
    Dots,
}

/// Points that belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// How it is drawn.
    pub mark: Mark,
    /// In order of x.
    pub points: Vec<(f64, f64)>,
}

/// An axis: its name, and whether equal steps are equal factors.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// With the unit.
    pub name: String,
    /// Equal steps are equal factors.
    pub log: bool,
}

/// One picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// What it shows, as one would say it.
    pub title: String,
    /// From left to right.
    pub x: Axis,
    /// From bottom to top; a linear one begins at zero.
    pub y: Axis,
    /// The first is drawn first.
    pub series: Vec<Series>,
}

/// Positions of one axis.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    fn new(axis: &Axis, values: impl Iterator<Item = f64>, zero: bool, from: f64, to: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for v in values.filter(|v| v.is_finite() && (!axis.log || *v > 0.0)) {
            low = low.min(v);
            high = high.max(v);
        }
        if low > high {
            (low, high) = (if axis.log { 1.0 } else { 0.0 }, 10.0);
        }
        if zero && !axis.log {
            low = low.min(0.0);
        }
        if high <= low {
            high = if axis.log { low * 10.0 } else { low + 1.0 };
        }
        if !axis.log && zero {
            high += (high - low) * 0.05;
        }
        Self {
            low,
            high,
            log: axis.log,
            from,
            to,
        }
    }

    fn at(&self, v: f64) -> f64 {
        let share = if self.log {
            (v.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (v - self.low) / (self.high - self.low)
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let mut out = Vec::new();
            let mut decade = 10_f64.powf(self.low.log10().floor());
            while decade <= self.high * 1.0001 {
                for m in [1.0, 2.0, 5.0] {
                    let v = decade * m;
                    if v >= self.low * 0.9999 && v <= self.high * 1.0001 {
                        out.push(v);
                    }
                }
                decade *= 10.0;
            }
            return out;
        }
        let rough = (self.high - self.low) / 6.0;
        let decade = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .into_iter()
            .map(|m| m * decade)
            .find(|s| *s >= rough)
            .unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..)
            .map(|n| n as f64 * step)
            .take_while(|v| *v <= self.high)
            .collect()
    }
}

/// A number as short as it can be told.
pub(crate) fn label(v: f64) -> String {
    if v == 0.0 {
        return "0".into();
    }
    if v.abs() >= 1000.0 {
        let text = format!("{v:.0}");
        let (sign, digits) = text.strip_prefix('-').map_or(("", &text[..]), |d| ("-", d));
        let mut out = String::new();
        for (n, c) in digits.chars().enumerate() {
            if n > 0 && (digits.len() - n).is_multiple_of(3) {
                out.push('\u{2009}');
            }
            out.push(c);
        }
        return format!("{sign}{out}");
    }
    let text = format!("{v:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text inside markup.
#[must_use]
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

impl Chart {
    /// The picture as an SVG element.
    #[must_use]
    pub fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|s| s.points.iter());
        let x = Scale::new(&self.x, points().map(|p| p.0), false, LEFT, WIDTH - RIGHT);
        let y = Scale::new(&self.y, points().map(|p| p.1), true, HEIGHT - BOTTOM, TOP);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\">\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\
             <text x=\"24\" y=\"28\" font-size=\"18\" font-weight=\"600\" fill=\"#222\">{}</text>",
            escaped(&self.title)
        );
        self.grid(&x, &y, &mut out);
        for (n, series) in self.series.iter().enumerate() {
            draw(series, COLOURS[n % COLOURS.len()], &x, &y, &mut out);
        }
        self.legend(&mut out);
        out.push_str("</svg>");
        out
    }

    fn grid(&self, x: &Scale, y: &Scale, out: &mut String) {
        let bottom = HEIGHT - BOTTOM;
        for v in y.ticks() {
            let at = y.at(v);
            let _ = write!(
                out,
                "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#e4e4e4\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 8.0,
                at + 4.5,
                label(v)
            );
        }
        for v in x.ticks() {
            let at = x.at(v);
            let _ = write!(
                out,
                "<path d=\"M{at:.1} {bottom:.1}v5\" stroke=\"#888\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
                bottom + 20.0,
                label(v)
            );
        }
        let _ = write!(
            out,
            "<path d=\"M{LEFT} {bottom:.1}H{:.1}\" stroke=\"#888\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#222\">{}</text>\
             <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\" fill=\"#222\">{}</text>",
            WIDTH - RIGHT,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 10.0,
            escaped(&self.x.name),
            (TOP + bottom) / 2.0,
            escaped(&self.y.name)
        );
    }

    fn legend(&self, out: &mut String) {
        let mut at = 24.0;
        for (n, series) in self.series.iter().enumerate() {
            let _ = write!(
                out,
                "<rect x=\"{at:.1}\" y=\"44\" width=\"14\" height=\"5\" rx=\"2\" fill=\"{}\"/><text x=\"{:.1}\" y=\"51\" fill=\"#222\">{}</text>",
                COLOURS[n % COLOURS.len()],
                at + 19.0,
                escaped(&series.name)
            );
            at += 42.0 + 7.2 * series.name.chars().count() as f64;
        }
    }
}

fn draw(series: &Series, colour: &str, x: &Scale, y: &Scale, out: &mut String) {
    let mut path = String::new();
    let mut last: Option<f64> = None;
    for (n, (px, py)) in series.points.iter().enumerate() {
        let (px, py) = (x.at(*px), y.at(*py));
        if let (Mark::Steps, Some(_)) = (series.mark, last) {
            let _ = write!(path, "H{px:.1}");
        }
        let _ = write!(path, "{}{px:.1} {py:.1}", if n == 0 { 'M' } else { 'L' });
        last = Some(px);
    }
    if series.mark == Mark::Steps
        && let (Some(first), Some(last)) = (series.points.first(), last)
    {
        let _ = write!(
            out,
            "<path d=\"{path}L{last:.1} {zero:.1}L{:.1} {zero:.1}Z\" fill=\"{colour}\" fill-opacity=\".14\"/>",
            x.at(first.0),
            zero = HEIGHT - BOTTOM
        );
    }
    let _ = write!(
        out,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linejoin=\"round\"/>"
    );
    if series.mark == Mark::Dots {
        for (px, py) in &series.points {
            let _ = write!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"/>",
                x.at(*px),
                y.at(*py)
            );
        }
    }
}

/// A page with a title, a few lines and pictures. It needs no other file.
#[must_use]
pub fn page(title: &str, lines: &[String], pictures: &[Picture]) -> String {
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{0}</title>\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <style>body{{max-width:980px;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif;color:#222;background:#fff}}\
         svg{{width:100%;height:auto;margin:1rem 0;border:1px solid #eee;border-radius:8px}}</style><h1>{0}</h1>",
        escaped(title)
    );
    for line in lines {
        let _ = write!(out, "<p>{}</p>", escaped(line));
    }
    for picture in pictures {
        out.push_str(&picture.svg());
    }
    out.push_str("</html>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(log: bool) -> Chart {
        let axis = |name: &str| Axis {
            name: name.into(),
            log,
        };
        Chart {
            title: "a < b".into(),
            x: axis("time (s)"),
            y: axis("bytes"),
            series: vec![Series {
                name: "one & two".into(),
                mark: Mark::Steps,
                points: vec![(1.0, 10.0), (10.0, 4000.0)],
            }],
        }
    }

    #[test]
    fn what_is_said_is_escaped_and_axes_have_ticks() {
        let svg = chart(false).svg();
        assert!(svg.contains("a &lt; b") && svg.contains("one &amp; two"), "{svg}");
        assert!(svg.contains("4\u{2009}000"), "{svg}");
        let log = chart(true).svg();
        assert!(log.contains(">20<") && log.contains(">2\u{2009}000<"), "{log}");
    }

    #[test]
    fn no_points_are_no_trouble() {
        let mut empty = chart(true);
        empty.series[0].points.clear();
        let page = page("t", &["l".into()], &[Picture::Chart(empty)]);
        assert!(page.contains("<svg") && !page.contains("NaN") && !page.contains("inf"));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(label(0.25), "0.25");
        assert_eq!(label(1200.0), "1\u{2009}200");
        assert_eq!(label(-1200.0), "-1\u{2009}200");
        assert_eq!(label(3.0), "3");
    }
}
