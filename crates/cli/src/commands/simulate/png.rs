//! A picture as PNG. The font is part of the program: a machine without any writes the same image.

use std::path::Path;
use std::sync::Arc;

use ebb_lab::picture::{self, Picture};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg;

use crate::error::{CliError, Result};

/// Points of the image for each of the picture.
const SCALE: f64 = 2.0;
/// Higher images are made smaller: a long list of pictures is still one file.
const MOST: f64 = 16_000.0;

/// Writes pictures below each other.
pub(super) fn write(path: &Path, title: &str, lines: &[String], pictures: &[Picture]) -> Result<()> {
    let (svg, width, height) = picture::sheet(title, lines, pictures);
    let failed = |what: String| CliError::failed(format!("{} could not be drawn: {what}", path.display()));
    let mut fonts = usvg::fontdb::Database::new();
    fonts.load_font_data(dejavu::sans::regular().to_vec());
    fonts.load_font_data(dejavu::sans::bold().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    let options = usvg::Options {
        fontdb: Arc::new(fonts),
        font_family: "DejaVu Sans".into(),
        ..usvg::Options::default()
    };
    let tree = usvg::Tree::from_str(&svg, &options).map_err(|e| failed(e.to_string()))?;
    let scale = SCALE.min(MOST / height.max(1.0));
    let size = |v: f64| (v * scale).ceil() as u32;
    let mut image =
        Pixmap::new(size(width), size(height)).ok_or_else(|| failed("there is nothing in it".into()))?;
    resvg::render(
        &tree,
        Transform::from_scale(scale as f32, scale as f32),
        &mut image.as_mut(),
    );
    image.save_png(path).map_err(|e| {
        CliError::usage(
            format!("cannot write {}: {e}", path.display()),
            "name a file in a folder that you may write to",
        )
    })
}

#[cfg(test)]
mod tests {
    use ebb_lab::picture::Bars;

    use super::*;

    #[test]
    fn words_and_colours_come_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.png");
        let bars = Picture::Bars(Bars {
            title: "Bars".into(),
            bars: vec![
                ("one".into(), 2.0, "2 s".into()),
                ("two".into(), 1.0, "1 s".into()),
            ],
        });
        write(&path, "Title", &["A line of words".into()], &[bars]).unwrap();
        let image = Pixmap::load_png(&path).unwrap();
        assert_eq!(image.width(), 1920);
        let dark = |from: u32, to: u32| {
            (from..to)
                .flat_map(|y| (0..image.width()).map(move |x| (x, y)))
                .filter(|(x, y)| image.pixel(*x, *y).unwrap().red() < 100)
                .count()
        };
        assert!(dark(20, 90) > 300, "the title is written");
        assert!(dark(180, image.height()) > 5000, "the first bar is dark");
        let error = write(Path::new("/nowhere/a.png"), "t", &[], &[]).unwrap_err();
        assert!(error.message.contains("/nowhere/a.png"), "{}", error.message);
    }
}
