//! Where the things under test were built.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Paths of the built command, libraries and programs.
#[derive(Debug)]
pub struct Artefacts {
    /// `target/<profile>`.
    pub folder: PathBuf,
    /// The command line.
    pub ebb: PathBuf,
    /// The preloaded library.
    pub layer: PathBuf,
    /// A folder with the simulated `libcuda.so.1` and `libnvidia-ml.so.1` under those names.
    pub sim: PathBuf,
}

impl Artefacts {
    /// Builds what is missing or old, once a test process, and says where it is.
    ///
    /// # Panics
    /// If it does not build.
    pub fn get() -> &'static Self {
        static BUILT: OnceLock<Artefacts> = OnceLock::new();
        BUILT.get_or_init(|| {
            let exe = std::env::current_exe().expect("a process knows its program");
            // target/<profile>/deps/<test>, or target/<profile>/<binary>
            let folder = exe
                .ancestors()
                .find(|dir| dir.join("deps").is_dir())
                .expect("tests lie in a target folder");
            if std::env::var_os("EBB_TESTS_PREBUILT").is_none() {
                build(folder);
            }
            let built = Self {
                folder: folder.to_path_buf(),
                ebb: folder.join("ebb"),
                layer: folder.join("libebb.so"),
                sim: lay_out_sim(folder),
            };
            for path in [&built.ebb, &built.layer] {
                assert!(
                    path.exists(),
                    "{} is missing: run `cargo build --workspace` first",
                    path.display()
                );
            }
            built
        })
    }

    /// A program of this package, such as `gpu-script`.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

fn build(folder: &Path) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--workspace", "--lib", "--bins"]);
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    cargo.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let status = cargo.status().expect("cargo starts");
    assert!(status.success(), "the workspace does not build");
}

/// The simulated libraries under the names that programs look for, replaced by rename so that a running test keeps its own.
fn lay_out_sim(folder: &Path) -> PathBuf {
    let sim = folder.join("test-sim");
    std::fs::create_dir_all(&sim).expect("the target folder is writable");
    for (built, name) in [
        ("libsimcuda.so", "libcuda.so.1"),
        ("libsimnvml.so", "libnvidia-ml.so.1"),
    ] {
        let temporary = sim.join(format!("{name}.{}", std::process::id()));
        let _ = std::fs::remove_file(&temporary);
        std::os::unix::fs::symlink(folder.join(built), &temporary).expect("a link can be made");
        std::fs::rename(&temporary, sim.join(name)).expect("a link can be renamed");
    }
    sim
}
