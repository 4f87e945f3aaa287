//! The results as a picture: every figure as a bar beside the bar of what limits it, in one file that loads nothing.
//!
//! Units differ from figure to figure, so each pair has a scale of its own: what is compared is within a pair, and the ratio stands beside it.

use std::fmt::Write as _;
use std::path::Path;

use super::Report;
use super::figure::{Figure, Unit};
use crate::error::{CliError, Result};

const WIDTH: f64 = 960.0;
/// Where bars begin and end.
const LEFT: f64 = 150.0;
const RIGHT: f64 = 610.0;
const TOP: f64 = 96.0;
const ROW: f64 = 66.0;
const BAR: f64 = 17.0;

const STYLE: &str = "\
text{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#1c2024}.faint{fill:#6b7480}.name{font-weight:600;font-size:14px}.title{font-size:20px;font-weight:600}
.ratio{font-size:20px;font-weight:600;text-anchor:end}.right{text-anchor:end}.paper{fill:#fff}.ebb{fill:#0072b2}.limit{fill:#b9c4ce}.line{stroke:#e3e8ec}
.dot{fill:#fff;stroke:#004a75;stroke-width:1.2}.good{fill:#00795a}.fair{fill:#9a6a00}.poor{fill:#b23c00}
@media(prefers-color-scheme:dark){text{fill:#e6e9ec}.faint{fill:#9aa4ae}.paper{fill:#15181b}.ebb{fill:#56b4e9}.limit{fill:#4a5560}.line{stroke:#2b3238}
.dot{fill:#15181b;stroke:#bfe3f7}.good{fill:#3ecf9e}.fair{fill:#e6b34a}.poor{fill:#ff8a5c}}";

/// Writes it, in the form that the file's name asks for.
pub(super) fn write(report: &Report, to: &Path) -> Result<()> {
    let svg = svg(report);
    let text = match to.extension().and_then(|e| e.to_str()) {
        Some("svg") => svg,
        Some("html" | "htm") => page(&svg),
        _ => unreachable!("checked before anything was measured"),
    };
    std::fs::write(to, text)
        .map_err(|error| CliError::failed(format!("cannot write {}: {error}", to.display())))
}

/// Whether a picture can have that name; to be asked before hours of measuring.
pub(super) fn check(to: &Path) -> Result<()> {
    let kind = to.extension().and_then(|e| e.to_str());
    if !matches!(kind, Some("svg" | "html" | "htm")) {
        return Err(CliError::usage(
            format!("{} is no kind of picture that is drawn here", to.display()),
            "name a .svg or .html file; a browser or `rsvg-convert` makes a .png of it",
        ));
    }
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(CliError::usage(
            format!("there is no folder {} for the picture", folder.display()),
            "make it first, or name another file",
        ));
    }
    Ok(())
}

fn page(svg: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>ebb bench</title>\n<style>:root{{color-scheme:light dark}}body{{margin:2rem auto;max-width:{WIDTH}px}}svg{{width:100%;height:auto}}</style>\n\
         {svg}</html>\n"
    )
}

fn svg(report: &Report) -> String {
    let height = TOP + ROW * report.figures.len() as f64 + 34.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"ebb bench\">\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n"
    );
    let mut text = |class: &str, x: f64, y: f64, words: &str| {
        let _ = writeln!(
            out,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
            escaped(words)
        );
    };
    text("title", 24.0, 38.0, "ebb bench");
    let rounds = match report.rounds {
        1 => "measured once".into(),
        n => format!("medians of {n}; each measurement is a dot"),
    };
    let card = ebb_units::Bytes(report.card_bytes);
    text("faint", 24.0, 62.0, &format!("{}, {card}; {rounds}", report.gpu));
    text(
        "faint right",
        WIDTH - 24.0,
        38.0,
        "% : of the rate of what is named below it",
    );
    text(
        "faint right",
        WIDTH - 24.0,
        62.0,
        "× : so many times its time; in the same run",
    );
    for (n, figure) in report.figures.iter().enumerate() {
        row(figure, TOP + ROW * n as f64, &mut out);
    }
    out.push_str("</svg>\n");
    out
}

fn row(figure: &Figure, y: f64, out: &mut String) {
    let _ = writeln!(
        out,
        "<path class=\"line\" d=\"M24 {0:.1}H{1:.1}\"/>",
        y - 8.0,
        WIDTH - 24.0
    );
    let longest = figure
        .samples
        .iter()
        .chain([&figure.ebb, &figure.limit])
        .copied()
        .filter(|value| value.is_finite())
        .fold(0.0, f64::max);
    let x = |value: f64| {
        LEFT + (RIGHT - LEFT)
            * if longest > 0.0 {
                (value / longest).clamp(0.0, 1.0)
            } else {
                0.0
            }
    };
    let mut text = |class: &str, x: f64, y: f64, words: &str| {
        let _ = writeln!(
            out,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
            escaped(words)
        );
    };
    text("name", 24.0, y + 16.0, figure.what);
    if figure.bytes > 0 {
        text(
            "faint",
            24.0,
            y + 36.0,
            &ebb_units::Bytes(figure.bytes).to_string(),
        );
    }
    text("", RIGHT + 10.0, y + 14.0, &figure.unit.show(figure.ebb));
    text("faint", RIGHT + 10.0, y + 35.0, &figure.unit.show(figure.limit));
    let (ratio, class) = verdict(figure);
    text(&format!("ratio {class}"), WIDTH - 24.0, y + 24.0, &ratio);
    text("faint right", WIDTH - 24.0, y + 43.0, figure.against);
    for (class, value, top) in [("ebb", figure.ebb, 0.0), ("limit", figure.limit, 21.0)] {
        let _ = writeln!(
            out,
            "<rect class=\"{class}\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"2\"/>",
            y + top,
            (x(value) - LEFT).max(1.0)
        );
    }
    if figure.samples.len() > 1 {
        for sample in &figure.samples {
            let _ = writeln!(
                out,
                "<circle class=\"dot\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"/>",
                x(*sample),
                y + BAR / 2.0
            );
        }
    }
}

/// The ratio as people read it, and how good it is.
fn verdict(figure: &Figure) -> (String, &'static str) {
    let ratio = figure.ratio;
    if !ratio.is_finite() {
        return ("-".into(), "");
    }
    match figure.unit {
        Unit::BytesPerS => {
            let class = match ratio {
                r if r >= 0.95 => "good",
                r if r >= 0.85 => "fair",
                _ => "poor",
            };
            (format!("{:.1} %", 100.0 * ratio), class)
        }
        Unit::Seconds | Unit::Bytes => {
            let class = match ratio {
                r if r <= 1.05 => "good",
                r if r <= 1.3 => "fair",
                _ => "poor",
            };
            (format!("×{ratio:.3}"), class)
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let rate = |what, bytes, against, ebb: &[f64], limit| {
            Figure::rates(what, bytes, against, ebb.to_vec(), vec![limit; ebb.len()])
        };
        Report {
            gpu: "NVIDIA <H200>".into(),
            card_bytes: 150_754_820_096,
            rounds: 3,
            figures: vec![
                rate(
                    "release",
                    16 << 30,
                    "pinned copy out",
                    &[54.2e9, 53.9e9, 54.4e9],
                    55.3e9,
                ),
                rate(
                    "restore",
                    16 << 30,
                    "pinned copy in",
                    &[55.1e9, 54.8e9, 55.2e9],
                    55.0e9,
                ),
                rate(
                    "clean",
                    64 << 30,
                    "copy inside the card",
                    &[917e9, 905e9, 921e9],
                    2200e9,
                ),
                rate(
                    "handover",
                    96 << 30,
                    "pinned copies both ways at once",
                    &[80e9, 82e9, 81e9],
                    94.0e9,
                ),
                Figure::paired(
                    "launch",
                    0,
                    "the same without ebb",
                    vec![3.40e-6, 3.42e-6, 3.41e-6],
                    vec![3.42e-6, 3.41e-6, 3.43e-6],
                ),
                Figure::paired(
                    "hibernate",
                    16 << 30,
                    "the driver's checkpoint alone",
                    vec![0.96, 0.95, 0.97],
                    vec![8.3, 8.4, 8.2],
                ),
                Figure::paired(
                    "start",
                    0,
                    "the same without ebb",
                    vec![0.412, 0.42, 0.405],
                    vec![0.4, 0.399, 0.403],
                ),
            ],
            phases: Vec::new(),
            others: Vec::new(),
            mismatches: 0,
        }
    }

    #[test]
    fn every_figure_is_in_it_with_its_limit_and_nothing_breaks_the_markup() {
        let report = report();
        let svg = svg(&report);
        assert!(svg.contains("NVIDIA &lt;H200&gt;") && !svg.contains("<H200>"));
        for figure in &report.figures {
            assert!(
                svg.contains(&format!(">{}</text>", figure.what)),
                "{}",
                figure.what
            );
            assert!(svg.contains(&escaped(figure.against)));
        }
        assert!(svg.contains("98.0 %") && svg.contains("×0.116"), "{svg}");
        assert_eq!(svg.matches("class=\"dot\"").count(), 21);
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        if let Some(folder) = std::env::var_os("EBB_PICTURE_OUT") {
            std::fs::write(Path::new(&folder).join("bench.svg"), &svg).unwrap();
        }
    }

    #[test]
    fn the_name_says_the_form() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.svg", "a.html"] {
            let to = dir.path().join(name);
            check(&to).unwrap();
            write(&report(), &to).unwrap();
            assert!(std::fs::read_to_string(&to).unwrap().contains("<svg"));
        }
        assert!(
            check(Path::new("a.png"))
                .unwrap_err()
                .fix
                .unwrap()
                .contains(".svg")
        );
    }

    #[test]
    fn nothing_measured_is_no_number() {
        let empty = Figure::rates("x", 0, "y", Vec::new(), Vec::new());
        assert_eq!(verdict(&empty).0, "-");
        let mut out = String::new();
        row(&empty, 0.0, &mut out);
        assert!(!out.contains("width=\"NaN"), "{out}");
    }
}
