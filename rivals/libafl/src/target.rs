//! Builds the targets: a JSON reader of this folder, and libpng.
//!
//! Each is built with the runtime of this folder, for the executor and LibAFL's fork server. libpng
//! is also built by AFL++'s compiler, with a fork server and for its persistent mode.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Failure;

/// Sources of libpng that read files.
const LIBPNG: [&str; 12] = [
    "png", "pngerror", "pngget", "pngmem", "pngpread", "pngread", "pngrio", "pngrtran", "pngrutil",
    "pngset", "pngtrans", "pngwrite",
];
/// Sources of libpng that `pngwrite` needs.
const LIBPNG_WRITER: [&str; 3] = ["pngwio", "pngwtran", "pngwutil"];
/// Sources of zlib.
const ZLIB: [&str; 8] =
    ["adler32", "crc32", "deflate", "inffast", "inflate", "inftrees", "trees", "zutil"];
/// Programs of the target libpng in its folder.
const PROGRAM: &str = "png";
const FORKING: &str = "png-afl-forks";
const PERSISTENT: &str = "png-afl-persistent";

/// Sources of the targets' own code.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzzed")
}

fn compile(
    compiler: &str,
    arguments: &[&str],
    files: &[PathBuf],
    made: &Path,
) -> Result<(), Failure> {
    let mut command = Command::new(compiler);
    command.arg("-O2").arg("-w").args(arguments).args(files).arg("-o").arg(made);
    // AFL++ prints a banner otherwise.
    let status = command.env("AFL_QUIET", "1").status()?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}").into()) }
}

/// Builds the JSON reader in `folder`, with instrumentation of its edges.
pub fn json(folder: &Path) -> Result<PathBuf, Failure> {
    std::fs::create_dir_all(folder)?;
    let (object, program) = (folder.join("json.o"), folder.join("json"));
    let edges = ["-c", "-fsanitize-coverage=trace-pc"];
    compile("cc", &edges, &[sources().join("target.c")], &object)?;
    compile("cc", &["-static"], &[sources().join("runtime.c"), object], &program)?;
    Ok(program)
}

/// The programs of the target libpng.
pub struct Png {
    /// With the runtime of this folder.
    pub program: PathBuf,
    /// With AFL++'s fork server.
    pub forking: Option<PathBuf>,
    /// For AFL++'s persistent mode.
    pub persistent: Option<PathBuf>,
}

impl Png {
    /// The programs that [`build_png`] has left in `folder`.
    pub fn find(folder: &Path) -> Option<Self> {
        let file = |name| Some(folder.join(name)).filter(|path: &PathBuf| path.is_file());
        let (forking, persistent) = (file(FORKING), file(PERSISTENT));
        Some(Self { program: file(PROGRAM)?, forking, persistent })
    }
}

/// Builds the target libpng in `folder` of the sources of libpng and zlib.
pub fn build_png(folder: &Path, libpng: &Path, zlib: &Path) -> Result<(), Failure> {
    let objects = folder.join("objects");
    std::fs::create_dir_all(&objects)?;
    std::fs::copy(libpng.join("scripts/pnglibconf.h.prebuilt"), objects.join("pnglibconf.h"))?;
    let include = [&objects, libpng, zlib].map(|path| format!("-I{}", path.display()));
    let include: Vec<&str> = include.iter().map(String::as_str).collect();
    let named = |folder: &Path, names: &[&str]| -> Vec<PathBuf> {
        names.iter().map(|name| folder.join(format!("{name}.c"))).collect()
    };
    let files = [
        vec![sources().join("libpng.c")],
        named(libpng, &LIBPNG),
        named(libpng, &LIBPNG_WRITER),
        named(zlib, &ZLIB),
    ]
    .concat();

    let mut linked = vec![sources().join("runtime.c")];
    for (number, file) in files.iter().enumerate() {
        let object = objects.join(format!("{number}.o"));
        let arguments = [&include[..], &["-c", "-fsanitize-coverage=trace-pc"]].concat();
        compile("cc", &arguments, std::slice::from_ref(file), &object)?;
        linked.push(object);
    }
    linked.push("-lm".into());
    compile("cc", &["-static"], &linked, &folder.join(PROGRAM))?;

    for (name, define) in [(FORKING, "-DFORKING"), (PERSISTENT, "-DPERSISTENT")] {
        let files = [vec![sources().join("afl.c")], files.clone(), vec!["-lm".into()]].concat();
        // All programs are static: a fork of a dynamic one copies more mappings.
        let arguments = [&include[..], &[define, "-static"]].concat();
        if let Err(error) = compile("afl-clang-fast", &arguments, &files, &folder.join(name)) {
            eprintln!("afl++ left out: afl-clang-fast, of the package afl++: {error}");
            break;
        }
    }
    Ok(())
}
