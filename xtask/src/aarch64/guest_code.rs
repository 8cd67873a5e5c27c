//! Guests of the Python and the npm package, compiled for arm64 by the package itself.
//!
//! wasmtime compiles for the processor that it runs on: compilers for others would be in every
//! package. So the package runs in the machine, and its compiled guests come back in the machine's
//! output.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::debian_root::{ENTER, machine, path};
use crate::command::run;

/// Runs the compiler, and prints its files.
const SCRIPT: &str = "
mkdir -p /debian/compiled
inside sh /compile-guests && echo '== compiled'
echo '== files'
tar -c -C /debian/compiled . | gzip | busybox base64
echo '== all ended'
";

/// An interpreter that compiles guests: its arguments, and the program. The last argument is the
/// folder for the compiled guests.
pub(crate) struct GuestCompiler {
    pub(crate) interpreter: &'static [&'static str],
    pub(crate) program: &'static str,
}

/// Compiles the guests of an unpacked package into the folder `to`.
pub(crate) fn compile_guests(package: &Path, compiler: &GuestCompiler, to: &Path) -> Result<()> {
    let mut machine = machine()?;
    machine.add_tree(package, &path("package"), |_| false)?;
    let words = compiler.interpreter.iter().chain([&compiler.program]);
    let quoted: Vec<_> = words.map(|word| quote(word)).collect();
    let line = format!("cd /package\nexec {} /compiled\n", quoted.join(" "));
    machine.add(&path("compile-guests"), line.as_bytes())?;
    let (mut files, mut is_list, mut compiled, mut all) = (String::new(), false, false, false);
    machine.boot(&format!("{ENTER}{SCRIPT}"), |line| {
        compiled |= line == "== compiled";
        all |= line == "== all ended";
        if line.starts_with("== ") {
            is_list = line == "== files";
        } else if is_list {
            files.push_str(line);
            files.push('\n');
        }
        !is_list
    })?;
    ensure!(compiled && all, "on arm64 the package compiles no guest");
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    let list = to.with_extension("base64");
    fs::write(&list, files).with_context(|| list.display().to_string())?;
    let mut unpack = Command::new("sh");
    unpack.args(["-c", "base64 -d \"$0\" | tar -xz --no-same-owner -C \"$1\""]);
    run(unpack.arg(&list).arg(to))?;
    fs::remove_file(&list).with_context(|| list.display().to_string())
}

/// A word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_quotes_is_one_word() {
        assert_eq!(quote("require('a')"), r"'require('\''a'\'')'");
    }
}
