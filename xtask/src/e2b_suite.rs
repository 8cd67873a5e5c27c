//! `cargo xtask e2b-suite`: E2B's own integration suites against `afresh serve`: those in Python
//! with its published clients, and those in JavaScript with the clients of their repositories,
//! which they import by path.
//!
//! A separate command: it fetches the suites and installs the clients and a template with
//! matplotlib and pandas, and nothing of them enters the repository. `docs/e2b-suite.md` has the
//! counts, and each test that does not pass, with its reason. A test without a reason in
//! [`REASONS`] fails the command.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{OwnedChild, cargo, output, run, succeeds};
use crate::{host, tools};

const USAGE: &str = "usage: cargo xtask e2b-suite [--source PREFIX] [--server PROGRAM] [SUITE…]";
/// Where the repositories of the suites are.
const SOURCE: &str = "https://github.com/e2b-dev";
/// The clients, as the tests of the server have them.
const CLIENTS: [&str; 2] = ["e2b-code-interpreter==2.11.5", "e2b==2.63.0"];
/// The client of the version of the suites, for those that replace functions within it.
const OLD_CLIENTS: [&str; 2] = ["e2b-code-interpreter==2.9.1", "e2b==2.45.1"];
/// Further packages of the suites.
const RUNNERS: [&str; 6] = [
    "pytest==9.0.3",
    "pytest-asyncio==1.3.0",
    "pytest-dotenv==0.5.2",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
    "python-dotenv==1.2.1",
];
/// The packages of the template of the code interpreter.
const TEMPLATE: [&str; 5] =
    ["matplotlib==3.11.2", "numpy==2.4.6", "pandas==3.1.1", "ipython", "e2b-charts"];
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
const mocked = all.filter((name) => /from 'msw/.test(readFileSync(name, 'utf8')))
const setup = ['tests/globalFetchFallback.setup.ts'].filter(existsSync)
const project = (name, include, setupFiles) => ({ test: {
  name, include, setupFiles, testTimeout: 120000, hookTimeout: 120000 } })
export default { test: { maxWorkers: 2, projects: [
  project('server', all.filter((name) => !mocked.includes(name)), setup),
  ...(mocked.length ? [project('mocked', mocked, [...setup, './afresh.setup.mjs'])] : []),
] } }
";
/// Removes the addresses of the server, for tests that mock it.
const VITEST_SETUP: &str = "delete process.env.E2B_API_URL\ndelete process.env.E2B_SANDBOX_URL\n";
/// The line before the part of the page that is replaced.
const MARK: &str = "<!-- written by `cargo xtask e2b-suite` -->\n";
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

/// Why tests whose name contains the text do not pass. The first that fits counts.
const REASONS: [(&str, &str); 57] = [
    ("connect_normalizes_unset_tokens", "the test expects another version of the client"),
    ("file_symlink", "the test expects another version of the client"),
    ("config_propagation", "the test expects unset variables of the client"),
    ("user_that_does_not_exist", "the message for an unknown user is another"),
    ("test_build.py", "the image `ubuntu:22.04`, which is not fetched, and has no Python"),
    (
        "test_background_build.py",
        "the image `ubuntu:22.04`, which is not fetched, and has no Python",
    ),
    ("template_sync/methods", "the image `ubuntu:22.04`, which is not fetched, and has no Python"),
    ("template_async/methods", "the image `ubuntu:22.04`, which is not fetched, and has no Python"),
    ("test_host.py", "the client needs a domain with HTTPS"),
    ("allow_public_traffic", "the client needs a domain with HTTPS"),
    ("auto_resume_wakes_on_http", "the client needs a domain with HTTPS"),
    ("mask_request_host", "the client needs a domain with HTTPS"),
    ("test_internet_access.py", "the internet"),
    ("test_network.py", "the internet, or the template `httpbin`"),
    ("filesystem_only", "saved states without memory"),
    ("mcp_gateway", "the service `mcp`"),
    ("scoped_env_vars", "`sudo` and the user `root` in the sandbox"),
    ("set_via_xattrs", "extended attributes in the sandbox"),
    ("watch_iterated", "a third event, for the owner, of a new file"),
    ("watch_recursive_directory_changes", "a third event, for the owner, of a new file"),
    ("test_r.py", "R is not run"),
    ("test_r_kernel", "R is not run"),
    ("cwd_r", "R is not run"),
    ("test_java.py", "Java is not run"),
    ("java_kernel", "Java is not run"),
    ("cwd_java", "Java is not run"),
    ("test_ts_kernel", "TypeScript needs Node.js 22.13, and the host has an older one"),
    ("cwd_typescript", "TypeScript needs Node.js 22.13, and the host has an older one"),
    ("systemd.py", "services of E2B's machine"),
    ("get_image_on_save", "an image that is saved is not shown"),
    ("get image on save", "an image that is saved is not shown"),
    ("host.test.ts", "the client needs a domain with HTTPS"),
    ("allowPublicTraffic", "the client needs a domain with HTTPS"),
    ("maskRequestHost", "the client needs a domain with HTTPS"),
    ("auto-resume wakes", "the client needs a domain with HTTPS"),
    ("with http server", "the client needs a domain with HTTPS"),
    ("internetAccess.test.ts", "the internet"),
    ("sandbox/network.test.ts", "the internet, or the template `httpbin`"),
    ("filesystem-only", "saved states without memory"),
    ("MCP gateway", "the service `mcp`"),
    ("xattrs is surfaced", "extended attributes in the sandbox"),
    ("as root", "`sudo` and the user `root` in the sandbox"),
    ("command scoped env vars", "`sudo` and the user `root` in the sandbox"),
    ("direct sandbox host", "the test expects unset variables of the client"),
    ("test_pty_connect.py", "the test waits 0.3 s for a new shell, which a busy host exceeds"),
    (
        "completed long running",
        "time stands still in a paused sandbox, and the test allows no delay of its resumption",
    ),
    ("cwd java", "Java is not run"),
    ("env_vars/java.test.ts", "Java is not run"),
    ("java kernel", "Java is not run"),
    ("cwd r", "R is not run"),
    ("env_vars/r.test.ts", "R is not run"),
    ("r kernel", "R is not run"),
    ("cwd typescript", "TypeScript needs Node.js 22.13, and the host has an older one"),
    ("ts kernel", "TypeScript needs Node.js 22.13, and the host has an older one"),
    ("systemd.test.ts", "services of E2B's machine"),
    ("box-and-whisker", "the test uses an argument that matplotlib 3.11 does not have"),
    ("box_and_whiskers", "the test uses an argument that matplotlib 3.11 does not have"),
];

/// How the tests of a suite went, by their names.
#[derive(Default)]
struct Counts {
    passed: usize,
    skipped: usize,
    failed: Vec<String>,
}

impl Counts {
    /// Reads the summary that pytest prints with `-rA`.
    fn read(text: &str) -> Self {
        let mut all: BTreeMap<String, bool> = BTreeMap::new();
        let mut skipped = 0;
        for line in text.lines() {
            let Some((how, rest)) = line.split_once(' ') else { continue };
            let name = rest.split(" - ").next().unwrap_or_default().trim().to_owned();
            match how {
                "PASSED" | "XPASS" | "XFAIL" if name.contains("::") => {
                    all.entry(name).or_insert(true);
                }
                // A test that passes and then cannot be cleaned up counts as failed.
                "FAILED" | "ERROR" if name.contains("::") => {
                    all.insert(name, false);
                }
                "SKIPPED" => {
                    let count = rest.trim_start_matches('[').split(']').next();
                    skipped += count.and_then(|count| count.parse().ok()).unwrap_or(1);
                }
                _ => {}
            }
        }
        let failed = all.iter().filter(|(_, passed)| !**passed).map(|(name, _)| name.clone());
        let failed: Vec<String> = failed.collect();
        Self { passed: all.len() - failed.len(), skipped, failed }
    }
}

impl Counts {
    /// Reads the report that vitest writes as JSON.
    fn read_report(text: &str) -> Result<Self> {
        let report: Value = serde_json::from_str(text).context("vitest wrote no report")?;
        let mut counts = Self::default();
        for file in report["testResults"].as_array().into_iter().flatten() {
            let path = file["name"].as_str().unwrap_or_default();
            let path = path.rsplit_once("/tests/").map_or(path, |(_, path)| path);
            let tests = file["assertionResults"].as_array().map_or(&[][..], Vec::as_slice);
            if tests.is_empty() && file["status"] == "failed" {
                counts.failed.push(format!("{path}::all tests of the file"));
            }
            for test in tests {
                match test["status"].as_str() {
                    Some("passed") => counts.passed += 1,
                    Some("failed") => {
                        let name = test["fullName"].as_str().unwrap_or_default();
                        counts.failed.push(format!("{path}::{name}"));
                    }
                    _ => counts.skipped += 1,
                }
            }
        }
        counts.failed.sort();
        Ok(counts)
    }
}

fn reason(test: &str) -> Option<&'static str> {
    REASONS.iter().find(|(part, _)| test.contains(part)).map(|(_, why)| *why)
}

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

/// Starts the server under test.
fn start(program: &Path, folder: &Path, python: &Path, port: u16) -> Result<OwnedChild> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    fs::write(folder.join("keys"), format!("tests {KEY}\n"))?;
    // The environment, and the installation that it was made of.
    let prefixes = "import sys; print(repr([sys.prefix, sys.base_prefix]).replace(\"'\", '\"'))";
    let dirs = output(Command::new(python).args(["-c", prefixes]))?;
    let config = format!(
        "addr = \"127.0.0.1:{port}\"\n[sandboxes]\nkeys = \"keys\"\nstore = \"store\"\n\
         [[sandboxes.template]]\nname = \"linux\"\nlanguage = \"python\"\nlinux = {:?}\ndirs = {dirs}\n\
         setup = \"import matplotlib.pyplot, pandas\"\nfiles-mib = 256\nmemory-mib = 1024\n",
        python.display().to_string(),
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
        let folder = host::target_folder().join("tools/e2b-suite-server");
        let _server = start(&program, &folder, &template.join("bin/python"), port)?;
        let url = format!("http://127.0.0.1:{port}");
        println!("$ {} (against {url})", suite.tests.join(" "));
        let counts = match suite.language {
            SuiteLanguage::Python => {
                let clients = if suite.replaces { &old } else { &new };
                run_python(suite, &sources, clients, &url)?
            }
            SuiteLanguage::JavaScript => run_script(suite, &sources, &packages, &url)?,
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

/// Tests in the folder of a suite, against the server at `url`.
fn tests(program: &Path, sources: &Path, url: &str) -> Command {
    let mut tests = Command::new(program);
    tests.current_dir(sources).stdin(Stdio::null());
    tests.env("E2B_API_URL", url).env("E2B_SANDBOX_URL", url).env("E2B_API_KEY", KEY);
    tests
}

fn run_python(suite: &Suite, sources: &Path, clients: &Path, url: &str) -> Result<Counts> {
    // Not `python -m pytest`, which would find the sources of the client before the installed one.
    let mut tests = tests(&clients.join("bin/pytest"), sources, url);
    tests.args(suite.tests);
    tests.args(["-q", "-rA", "--tb=no", "--numprocesses=2", "-p", "no:cacheprovider"]);
    tests.args(["--timeout=120"]);
    let done = tests.output().context("cannot run pytest")?;
    let text = String::from_utf8_lossy(&done.stdout);
    let counts = Counts::read(&text);
    if counts.passed == 0 {
        let told = String::from_utf8_lossy(&done.stderr);
        bail!("no test of the suite {} passed:\n{text}{told}", suite.name);
    }
    Ok(counts)
}

fn run_script(suite: &Suite, sources: &Path, packages: &Path, url: &str) -> Result<Counts> {
    let modules = sources.join("node_modules");
    if !modules.exists() {
        std::os::unix::fs::symlink(packages.join("node_modules"), modules)?;
    }
    let (config, report) = (sources.join("afresh.config.mjs"), sources.join("report.json"));
    fs::write(&config, VITEST)?;
    fs::write(sources.join("afresh.setup.mjs"), VITEST_SETUP)?;
    let _ = fs::remove_file(&report);
    let mut tests = tests(&packages.join("node_modules/.bin/vitest"), sources, url);
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

/// Replaces the counts in the page.
fn write(results: &[(&Suite, Counts)]) -> Result<()> {
    let page = host::repository().join("docs/e2b-suite.md");
    let old = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
    let (head, _) = old.split_once(MARK).context("the page has no mark")?;
    fs::write(&page, format!("{head}{MARK}\n{}", tables(results)))
        .with_context(|| page.display().to_string())
}

fn tables(results: &[(&Suite, Counts)]) -> String {
    let mut text = String::from("| suite | passed | of | skipped |\n|---|---|---|---|\n");
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (suite, counts) in results {
        let all = counts.passed + counts.failed.len();
        let _ =
            writeln!(text, "| {} | {} | {all} | {} |", suite.name, counts.passed, counts.skipped);
        for test in &counts.failed {
            reasons.entry(reason(test).unwrap_or("not known")).or_default().push(test);
        }
    }
    text.push_str("\n| reason | tests |\n|---|---|\n");
    for (why, tests) in reasons {
        let mut names: Vec<&str> = tests.iter().map(|test| short(test)).collect();
        names.sort_unstable();
        names.dedup();
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let _ = writeln!(text, "| {why} | {} |", names.join(", "));
    }
    text
}

/// The name of a test without its file and its parameters.
fn short(test: &str) -> &str {
    let name = test.rsplit("::").next().unwrap_or(test);
    name.split('[').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_vitest_is_read() {
        let text = r#"{"testResults": [
            {"name": "/x/tests/a.test.ts", "status": "failed", "assertionResults": [
                {"status": "passed", "fullName": "one"}, {"status": "failed", "fullName": "b two"},
                {"status": "skipped", "fullName": "three"}]},
            {"name": "/x/tests/b.test.ts", "status": "failed", "assertionResults": []}]}"#;
        let counts = Counts::read_report(text).unwrap();
        assert_eq!((counts.passed, counts.skipped), (1, 1));
        assert_eq!(counts.failed, ["a.test.ts::b two", "b.test.ts::all tests of the file"]);
    }

    #[test]
    fn the_summary_of_pytest_is_read() {
        let text = "....F\nPASSED tests/a.py::one\nPASSED tests/a.py::two[x - y]\nFAILED tests/test_r.py::three - boom\n\
                    ERROR tests/a.py::two[x - y]\nSKIPPED [3] tests/b.py:7: no reason\n1 failed in 3 s\n";
        let counts = Counts::read(text);
        assert_eq!((counts.passed, counts.skipped), (1, 3));
        assert_eq!(counts.failed, ["tests/a.py::two[x", "tests/test_r.py::three"]);
        assert_eq!(
            (reason("tests/test_r.py::three"), reason("other")),
            (Some("R is not run"), None)
        );
        assert_eq!(short("tests/a.py::two[x"), "two");
        let page = tables(&[(&SUITES[0], counts)]);
        assert!(page.contains("| sandboxes | 1 | 3 | 3 |"), "{page}");
        assert!(page.contains("| R is not run | `three` |"), "{page}");
    }
}
