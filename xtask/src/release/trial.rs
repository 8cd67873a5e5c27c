//! Tries each package in a clean Debian root without Rust or a compiler.
//!
//! The root is made by mmdebstrap and entered by chroot, so this needs root. Each trial prints the
//! version, runs a Linux program, and calls a Wasm guest of this repository from its warm state.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::Package;
use super::installation::{copy, write};
use crate::command::{find, output, run};
use crate::{aarch64, guests, host, node};

const RELEASE: &str = "bookworm";
const NO_TRIAL_OF_MUSL: &str = "`readelf -d` only: Debian has no Python for musl";

/// Tries all packages; returns what was run with each.
pub(super) fn all(packages: &[Package]) -> Result<Vec<String>> {
    if find("mmdebstrap").is_none() {
        host::apt_install(&["mmdebstrap"])?;
    }
    let folder = host::target_folder().join("release-trial");
    let base = folder.join("base.tar");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut debian = Command::new("mmdebstrap");
    debian.args([
        "--quiet",
        "--variant=minbase",
        "--include=ca-certificates,python3-venv,rpm",
        RELEASE,
    ]);
    run(debian.arg(&base))?;
    let guest = guests::named("js")?;
    guests::build(guest)?;
    let mut tried = Vec::new();
    for package in packages {
        tried.push(try_one(package, &folder, &base, &guests::path(guest)).with_context(|| {
            format!("the package {} does not work in a clean root", package.path.display())
        })?);
    }
    std::fs::remove_file(&base).context("cannot remove the clean root")?;
    Ok(tried)
}

/// Tries the packages for arm64; returns what was run with each.
pub(super) fn all_of_arm64(packages: &[Package]) -> Result<Vec<String>> {
    let one = |package: &Package| match package.kind {
        "archive" => aarch64::try_archive(&package.path),
        "wheel" => aarch64::try_wheel(&package.path, FIRST_CODE),
        "npm" => aarch64::try_npm(&package.path, FIRST_SCRIPT),
        "musl-wheel" => Ok(NO_TRIAL_OF_MUSL.to_owned()),
        _ => Ok("not tried: it has the files of the archive".to_owned()),
    };
    packages.iter().map(one).collect()
}

/// A root with the kernel's file systems, which it gives back in the end.
struct Root(PathBuf);

impl Root {
    fn unpack(folder: &Path, base: &Path) -> Result<Self> {
        let root = folder.join("root");
        std::fs::create_dir_all(&root)?;
        run(Command::new("tar").arg("-xf").arg(base).arg("-C").arg(&root))?;
        let this = Self(root);
        for system in ["proc", "dev", "sys"] {
            let to = this.0.join(system);
            run(Command::new("mount").args(["--rbind", &format!("/{system}")]).arg(&to))?;
            // A later removal must not reach the host's.
            run(Command::new("mount").arg("--make-rslave").arg(&to))?;
        }
        Ok(this)
    }

    /// Runs a command in the root, and returns its output.
    fn run(&self, arguments: &[&str]) -> Result<String> {
        output(Command::new("chroot").arg(&self.0).args(arguments))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let mut all_unmounted = true;
        for system in ["proc", "dev", "sys"] {
            let unmounted =
                Command::new("umount").args(["-R", "-l"]).arg(self.0.join(system)).status();
            all_unmounted &= unmounted.is_ok_and(|status| status.success());
        }
        // A file system that is still mounted there belongs to the host.
        if all_unmounted {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

fn try_one(package: &Package, folder: &Path, base: &Path, guest: &Path) -> Result<String> {
    if package.kind == "musl-wheel" {
        return Ok(NO_TRIAL_OF_MUSL.to_owned());
    }
    let root = Root::unpack(folder, base)?;
    ensure!(root.run(&["sh", "-c", "command -v cc cargo rustc || true"])?.is_empty(), "not clean");
    let name = package.path.file_name().context("a package has a name")?.to_string_lossy();
    let inside = format!("/tmp/{name}");
    copy(&package.path, &root.0.join("tmp").join(&*name))?;
    copy(guest, &root.0.join("tmp/js.wasm"))?;
    let installed = match package.kind {
        "deb" => {
            root.run(&["dpkg", "-i", &inside])?;
            "dpkg -i"
        }
        "rpm" => {
            // Debian's database of RPM packages is empty, so no requirement is met in it.
            root.run(&["rpm", "--install", "--nodeps", &inside])?;
            "rpm --install"
        }
        "archive" | "static-archive" => {
            root.run(&[
                "tar",
                "-xzf",
                &inside,
                "-C",
                "/usr/bin",
                "--strip-components=1",
                "--wildcards",
                "*/afresh",
            ])?;
            "tar -x"
        }
        "wheel" => return try_wheel(&root, &inside),
        "npm" => return try_npm(&root, &inside),
        "c-library" => return try_c_library(&root, &inside),
        "image" => {
            // The image has neither a shell nor other programs: its own files are the root.
            return try_image(&root, &package.path);
        }
        other => bail!("no trial of {other}"),
    };
    let version = root.run(&["afresh", "--version"])?;
    ensure!(version.ends_with(env!("CARGO_PKG_VERSION")), "it calls itself {version:?}");
    let said = root.run(&["afresh", "exec", "--", "/bin/echo", "hi"])?;
    ensure!(said == "hi", "a Linux program printed {said:?}");
    let answer = root.run(&[
        "afresh",
        "run",
        "/tmp/js.wasm",
        "--warm",
        "warm",
        "--call",
        "handle",
        "--input",
        r#"{"op":"probe"}"#,
        "-n",
        "2",
    ])?;
    ensure!(answer.lines().count() == 2, "a Wasm guest answered {answer:?}");
    Ok(format!("`{installed}`, `afresh --version`, `exec -- echo hi`, `run js.wasm`"))
}

/// Makes the first warm guest in a new environment, and runs code in it.
const FIRST_CODE: &str = "\
import time
start = time.monotonic()
import afresh
js = afresh.warm('js')
assert js.run_code('[1, 2].map(n => n + 1)').value == [2, 3]
seconds = time.monotonic() - start
assert not list(afresh.cache_dir().glob('*')), 'a guest was compiled'
print(f'{seconds:.2f} s')
";

/// The same in Node.
const FIRST_SCRIPT: &str = "\
const start = performance.now()
const afresh = require('afresh')
const main = async () => {
  const js = await afresh.warm('js')
  const value = (await js.runCode('[1, 2].map(n => n + 1)')).value
  if (JSON.stringify(value) !== '[2,3]') throw new Error(JSON.stringify(value))
  const seconds = (performance.now() - start) / 1000
  if (require('node:fs').existsSync(`${process.env.HOME}/.cache/afresh`)) throw new Error('a guest was compiled')
  console.log(`${seconds.toFixed(2)} s`)
}
main()
";

fn try_npm(root: &Root, inside: &str) -> Result<String> {
    copy(&node::oldest()?, &root.0.join("usr/local/bin/node"))?;
    root.run(&["mkdir", "-p", "/opt/node_modules/afresh"])?;
    let unpack = ["tar", "-xzf", inside, "-C", "/opt/node_modules/afresh", "--strip-components=1"];
    root.run(&unpack)?;
    write(&root.0.join("opt/first.js"), FIRST_SCRIPT.as_bytes())?;
    let seconds = root.run(&["env", "HOME=/root", "node", "/opt/first.js"])?;
    let version = root.run(&["node", "--version"])?;
    Ok(format!("`tar -x`, `runCode` in Node {version} (`require` to the first answer: {seconds})"))
}

/// A program that the host compiles with the archive alone restores a snapshot that the root has no
/// command for.
fn try_c_library(root: &Root, inside: &str) -> Result<String> {
    root.run(&["tar", "-xzf", inside, "-C", "/opt", "--strip-components=1"])?;
    let opt = root.0.join("opt");
    let mut pkg_config = Command::new("pkg-config");
    if find("pkg-config").is_none() {
        host::apt_install(&["pkg-config"])?;
    }
    pkg_config.env("PKG_CONFIG_PATH", opt.join("lib/pkgconfig"));
    let flags = output(pkg_config.args(["--cflags", "--libs", "afresh"]))?;
    let source = opt.join("examples/restore.c");
    let mut shared = Command::new("cc");
    shared.arg("-o").arg(opt.join("restore")).arg(&source).args(flags.split_whitespace());
    run(&mut shared)?;
    let mut fixed = Command::new("cc");
    fixed.arg("-o").arg(opt.join("restore-static")).arg(&source);
    fixed.arg("-I").arg(opt.join("include")).arg(opt.join("lib/libafresh.a"));
    run(fixed.args(["-lgcc_s", "-lm", "-lpthread", "-ldl"]))?;
    let golden = host::repository().join("crates/store/tests/golden/v1");
    run(Command::new("cp").arg("-r").arg(golden).arg(opt.join("store")))?;
    let shared = ["env", "LD_LIBRARY_PATH=/opt/lib", "/opt/restore", "/opt/store", "base"];
    let sum = root.run(&shared)?;
    ensure!(sum.starts_with("16384 ") && sum.ends_with(" 1"), "the snapshot has {sum:?}");
    let other = root.run(&["/opt/restore-static", "/opt/store", "base"])?;
    ensure!(other == sum, "the static library restored {other:?}, and the shared one {sum:?}");
    Ok("`examples/restore.c` with the shared and the static library restores a snapshot".to_owned())
}

fn try_wheel(root: &Root, inside: &str) -> Result<String> {
    root.run(&["python3", "-m", "venv", "/opt/environment"])?;
    let python = "/opt/environment/bin/python";
    root.run(&[python, "-m", "pip", "install", "--quiet", "--no-index", inside])?;
    write(&root.0.join("tmp/first.py"), FIRST_CODE.as_bytes())?;
    let seconds = root.run(&[python, "/tmp/first.py"])?;
    Ok(format!("`pip install`, `run_code` (import to the first answer: {seconds})"))
}

/// Runs the command of the image with nothing but the image's files.
fn try_image(root: &Root, image: &Path) -> Result<String> {
    let files = root.0.join("tmp/image");
    std::fs::create_dir_all(&files)?;
    run(Command::new("tar").arg("-xf").arg(image).arg("-C").arg(&files))?;
    let blobs = files.join("blobs/sha256");
    let mut layers = 0;
    for entry in std::fs::read_dir(&blobs)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        ensure!(super::digest(&path)? == name, "the blob {name} has another digest");
        let unpacked = files.join("root");
        std::fs::create_dir_all(&unpacked)?;
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(&path).arg("-C").arg(&unpacked);
        layers += u32::from(crate::command::succeeds(&mut tar));
    }
    ensure!(layers == 1, "the image has {layers} layers");
    let mut command = Command::new("chroot");
    command
        .arg("--userspec=65532:65532")
        .arg(files.join("root"))
        .args(["/usr/bin/afresh", "--version"]);
    let version = output(&mut command)?;
    ensure!(version.ends_with(env!("CARGO_PKG_VERSION")), "it calls itself {version:?}");
    Ok("its only layer as the root, `afresh --version` as user 65532".to_owned())
}
