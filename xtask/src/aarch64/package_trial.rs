//! Trials of the Python and the npm package in the machine, in a Debian root.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::debian_root::{ENTER, machine, path};

/// Installs the wheel with Debian's Python, and runs the program.
const WHEEL_SCRIPT: &str = "
inside python3 -m venv /opt/environment || echo '== failed'
for wheel in /debian/trial/*.whl; do
    inside /opt/environment/bin/python -m pip install --quiet --no-index \"${wheel#/debian}\" ||
        echo '== failed'
done
echo \"== version $(inside /opt/environment/bin/python --version)\"
echo \"== first $(inside /opt/environment/bin/python /trial/first)\"
echo '== all ended'
";

/// The same for the npm package with Debian's Node.
const NPM_SCRIPT: &str = "
mkdir -p /debian/opt/node_modules
gzip -dc /debian/trial/*.tgz | tar -x -C /debian/opt/node_modules || echo '== failed'
busybox mv /debian/opt/node_modules/package /debian/opt/node_modules/afresh
cp /debian/trial/first /debian/opt/first.js
echo \"== version $(inside node --version)\"
echo \"== first $(inside node /opt/first.js)\"
echo '== all ended'
";

/// Tries a wheel; returns what was run. `program` uses the package, and prints the time from its
/// start to the first answer of a guest.
pub(crate) fn try_wheel(wheel: &Path, program: &str) -> Result<String> {
    let (version, seconds) = try_package(wheel, program, WHEEL_SCRIPT)?;
    Ok(format!(
        "in the emulated machine: `pip install`, `run_code` in {version} (import to the first \
         answer: {seconds})"
    ))
}

/// Tries an npm package, as [`try_wheel`].
pub(crate) fn try_npm(archive: &Path, program: &str) -> Result<String> {
    let (version, seconds) = try_package(archive, program, NPM_SCRIPT)?;
    Ok(format!(
        "in the emulated machine: `tar -x`, `runCode` in Node {version} (`require` to the first \
         answer: {seconds})"
    ))
}

/// Runs a script with a package and a program: the interpreter's version, and the output of the
/// program.
fn try_package(package: &Path, program: &str, script: &str) -> Result<(String, String)> {
    let mut machine = machine()?;
    let name = package.file_name().context("a package has a name")?;
    machine.add_file(package, &path("trial").join(name))?;
    machine.add(&path("trial/first"), program.as_bytes())?;
    let (mut version, mut first, mut all, mut failed) = (None, None, false, false);
    machine.boot(&format!("{ENTER}{script}"), |line| {
        all |= line == "== all ended";
        failed |= line == "== failed";
        version = line.strip_prefix("== version ").map(str::to_owned).or(version.take());
        first = line.strip_prefix("== first ").map(str::to_owned).or(first.take());
        true
    })?;
    let first = first.filter(|first| first.ends_with(" s"));
    ensure!(all && !failed, "the machine did not run the package");
    let first = first.context("on arm64 the first guest of the package gave no answer")?;
    Ok((version.unwrap_or_default(), first))
}
