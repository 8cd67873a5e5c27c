//! A build of a template: a sandbox of the base runs the steps, and its state becomes the template.
//!
//! Promises: a template is replaced once its build has succeeded. A step that an earlier build ran,
//! after the same steps on the same base, is not run again while the server runs. The base of an
//! image is the one that its tag means when the build starts. May break it:
//! steps whose effect depends on more than the sandbox, such as downloads, which `skip_cache` runs
//! again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use afresh::files::Time;
use afresh_interpreter::Stream;
use hyper::StatusCode;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::sandbox::agent::process::CommandTarget;
use crate::sandbox::catalog::build_image::PinnedImage;
use crate::sandbox::catalog::build_request::{Action, Step, tagged};
use crate::sandbox::catalog::builds::{Build, BuildFailure, ImageGuest, RunningBuild};
use crate::sandbox::catalog::image_name::full_image_name;
use crate::sandbox::catalog::snapshots::SnapshotOptions;
use crate::sandbox::catalog::step_environment::StepEnvironment;
use crate::sandbox::config::Template;
use crate::sandbox::http::session_error::refused;
use crate::sandbox::http::user::User;
use crate::sandbox::lifecycle::creation::CreateOptions;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::records::record::{BuiltTemplate, LAYER, SandboxSettings, SnapshotRecord};
use crate::sandbox::request_body::template_requests::BuildPlan;
use crate::sandbox::request_body::unknown_fields::UnknownFields;

/// The time limit of a build, and of one step.
const BUILD_TIMEOUT: Duration = Duration::from_secs(60 * 60);
/// Time for which the ready command may fail after the start.
const READY_TIMEOUT: Duration = Duration::from_secs(5 * 60);
/// Interval of its attempts.
const READY_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum characters of a step in a message.
const MAX_SHOWN_CHARS: usize = 200;
/// The uploaded archive in the sandbox.
const ARCHIVE: &str = "/tmp/.afresh-files.tar";

/// Unpacks the archive and copies what the source names: a file to the target, or into it where
/// that is a directory; the contents of a directory into the target. Links may be absolute, which
/// the filter `data` of newer Pythons refuses.
const COPY: &str = r#"
import glob, os, shutil, sys, tarfile, tempfile
archive, source, target, mode = sys.argv[1:]
into = tempfile.mkdtemp()
with tarfile.open(archive) as files:
    files.extractall(into, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
found = sorted(glob.glob(os.path.join(into, source), recursive=True))
if not found:
    sys.exit(f"{source} is not among the uploaded files")
def put(one, to):
    if os.path.isdir(one) and not os.path.islink(one):
        shutil.copytree(one, to, symlinks=True, dirs_exist_ok=True)
    else:
        os.makedirs(os.path.dirname(to) or "/", exist_ok=True)
        shutil.copy2(one, to, follow_symlinks=False)
    if mode:
        os.chmod(to, int(mode, 8))
        for root, directories, names in os.walk(to):
            for name in directories + names:
                os.chmod(os.path.join(root, name), int(mode, 8))
for one in found:
    inside = target.endswith("/") or len(found) > 1 or os.path.isdir(target)
    plain = not os.path.isdir(one)
    put(one, os.path.join(target, os.path.basename(one)) if plain and inside else target)
shutil.rmtree(into)
os.remove(archive)
"#;

/// The failure of a command of a step.
enum LineEnd {
    /// With this exit code.
    Exit(i64),
    /// It did not run to its end.
    Broken(String),
}

/// The beginning of a line, for a message.
fn shortened(line: &str) -> String {
    let mut shown = line.trim().chars();
    let mut short: String = shown.by_ref().take(MAX_SHOWN_CHARS).collect();
    if shown.next().is_some() {
        short.push('\u{2026}');
    }
    short
}

/// The images of E2B that stand for the first template.
const DEFAULT_IMAGES: [&str; 2] = ["e2bdev/base", "e2bdev/code-interpreter"];

/// The starting point of a build.
enum Base {
    Template(String),
    Image(PinnedImage),
}

/// The starting point that a plan names.
enum PlannedBase {
    Template(String),
    /// The full name of an image.
    Image(String),
}

impl BuildPlan {
    /// The starting point, where templates may stand for images.
    fn base(&self, templates: &[Template]) -> Result<PlannedBase, String> {
        match (&self.from_template, &self.from_image) {
            (Some(name), None) => Ok(PlannedBase::Template(name.clone())),
            (None, Some(image)) => {
                let plain = image.split(':').next().unwrap_or_default();
                let full = full_image_name(image);
                let is_it = |known: &String| full_image_name(known) == full;
                let stands = templates.iter().find(|one| one.images.iter().any(is_it));
                Ok(match (stands, DEFAULT_IMAGES.contains(&plain)) {
                    (Some(template), _) => PlannedBase::Template(template.name.clone()),
                    (None, true) => PlannedBase::Template("base".to_owned()),
                    (None, false) => PlannedBase::Image(full),
                })
            }
            _ => Err("a build has either `fromTemplate` or `fromImage`".to_owned()),
        }
    }
}

impl Sandboxes {
    /// Runs a build to its end, and notes how it went.
    pub(crate) async fn build(
        self: Arc<Self>,
        build: Arc<Build>,
        plan: BuildPlan,
        steps: Vec<Step>,
    ) {
        // Also if the build panics.
        let _running = RunningBuild(&build);
        let _place = self.builds.place(&build.tenant).await;
        let ended = self.run_build(&build, &plan, &steps).await;
        if let Err(BuildFailure { step, exit_code, .. }) = &ended {
            // Not the reason: it may quote a step, and steps have secrets.
            tracing::info!(template = build.template, step, exit_code, "a build failed");
        }
        build.end(ended);
    }

    async fn run_build(
        self: &Arc<Self>,
        build: &Arc<Build>,
        plan: &BuildPlan,
        steps: &[Step],
    ) -> Result<(), BuildFailure> {
        let early = BuildFailure::from;
        let base = match plan.base(&self.templates.configured()).map_err(early)? {
            PlannedBase::Template(name) => Base::Template(name),
            PlannedBase::Image(name) => {
                let pinned = self.pin_image(build, &name, plan.force).await;
                Base::Image(pinned.map_err(|refusal| early(refusal.message))?)
            }
        };
        let keys = self.layer_keys(&build.tenant, &base, steps).await.map_err(early)?;
        // The longest run of steps whose state is there.
        let cached = match plan.force {
            true => 0,
            false => steps.iter().take_while(|step| !step.force).count(),
        };
        let mut begun = (0, None);
        for at in (1..=cached).rev() {
            let found = self.snapshot(&build.tenant, &keys[at]).await;
            if let Some(layer) = found.map_err(|refusal| early(refusal.message))? {
                begun = (at, Some(layer.record.id));
                break;
            }
        }
        let (first, layer) = begun;
        let sandbox = self.base_sandbox(build, &base, layer).await;
        let sandbox = sandbox.map_err(|refusal| early(refusal.message))?;
        let done = self.run_steps(build, plan, (steps, first), &sandbox, &keys).await;
        // It may have ended by itself.
        let _ = self.kill(&sandbox).await;
        done
    }

    /// The names of the states before the first step and after each.
    async fn layer_keys(
        &self,
        tenant: &Arc<str>,
        base: &Base,
        steps: &[Step],
    ) -> Result<Vec<String>, String> {
        let of_base = match base {
            Base::Image(image) => format!("image {}", image.reference),
            Base::Template(name) => match self.snapshot(tenant, name).await {
                Ok(Some(known)) => format!("snapshot {}", known.record.id),
                Ok(None) => format!("template {name} {}", self.template(name).identity),
                Err(refusal) => return Err(refusal.message),
            },
        };
        // Templates may be others after a restart.
        let mut hash = Sha256::new_with_prefix(format!("{}\n{of_base}", self.boot));
        let mut keys = vec![String::new()];
        for step in steps {
            hash.update(format!("\n{:?}", step.action));
            let digest = hash.clone().finalize();
            let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            keys.push(format!("{LAYER}{digits}"));
        }
        Ok(keys)
    }

    /// A sandbox of the base, or of a later state.
    async fn base_sandbox(
        self: &Arc<Self>,
        build: &Build,
        base: &Base,
        layer: Option<String>,
    ) -> Result<Arc<Sandbox>, ErrorResponse> {
        let metadata = BTreeMap::from([("build".to_owned(), build.template.clone())]);
        let settings = SandboxSettings { metadata, ..SandboxSettings::default() };
        let template = match (layer, base) {
            (Some(layer), _) => {
                build.log("info", "the first steps are cached");
                layer
            }
            (None, Base::Template(name)) => name.clone(),
            (None, Base::Image(image)) => {
                build.log("info", &format!("FROM {}", image.name));
                // Before the pull, which takes memory itself.
                self.memory.admit(1).await?;
                let ImageGuest { warm, template, .. } = self.image(&build.tenant, image).await?;
                let times = self.lifetime(BUILD_TIMEOUT, false);
                let session = warm.guest.session().map_err(|error| refused(&error))?;
                // Its files are those of the image, which no template of the configuration has.
                let of = (template.config.name.clone(), None);
                let mut sandbox = self.assemble(&build.tenant, of, settings, session, times)?;
                // It has the options of the template. Saves of the sandbox build on its state.
                sandbox.warm = warm.into();
                let sandbox = Arc::new(sandbox);
                self.admit(vec![sandbox.clone()]).await?;
                return Ok(sandbox);
            }
        };
        let wanted = CreateOptions {
            template,
            template_only: false,
            time: BUILD_TIMEOUT,
            pause_at_end: false,
            settings,
        };
        let sandbox = self.create(&build.tenant, wanted).await?;
        if !self.template_of(&sandbox).config.linux {
            let _ = self.kill(&sandbox).await;
            let message = "a build needs a template of a Linux program; this one evaluates code";
            return Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message));
        }
        Ok(sandbox)
    }

    async fn run_steps(
        self: &Arc<Self>,
        build: &Arc<Build>,
        plan: &BuildPlan,
        (steps, first): (&[Step], usize),
        sandbox: &Arc<Sandbox>,
        keys: &[String],
    ) -> Result<(), BuildFailure> {
        let mut around = StepEnvironment {
            user: User::of(sandbox.settings.root),
            directory: sandbox.settings.directory.clone(),
            envs: sandbox.settings.envs.clone(),
        };
        let target = CommandTarget { all: self.clone(), sandbox: sandbox.clone() };
        let begun = Instant::now();
        for (at, step) in steps.iter().enumerate() {
            let failed = |why: String| BuildFailure { step: Some(at), ..why.into() };
            if begun.elapsed() > BUILD_TIMEOUT {
                return Err(failed("the build takes longer than an hour".to_owned()));
            }
            around.follow(&step.action);
            build.begin_output();
            let title = shortened(&step.action.title());
            if at < first {
                build.log("info", &format!("CACHED {}", step.action.title()));
                continue;
            }
            build.log("info", &step.action.title());
            let ran = match &step.action {
                Action::Run { line, user } => {
                    let around = around.of(*user);
                    let shell = ["/bin/bash", "-l", "-c", line.as_str()];
                    self.run_line(build, &target, &shell, &around).await.map(|()| true)
                }
                Action::Copy { source, target: to, mode, files, user } => {
                    let around = around.of(*user);
                    let missing = || failed(format!("the files for `{title}` were not uploaded"));
                    let uploaded = self.builds.file(&build.tenant, files).ok_or_else(missing)?;
                    // Read in the sandbox's turn, so that builds that wait hold no content.
                    let written = self.files(sandbox, move |tree| {
                        let content = uploaded.read().map_err(|error| internal(&error))?;
                        let put = tree.write_path(ARCHIVE, &content, Time::now()).map(drop);
                        put.map_err(|error| {
                            crate::sandbox::transfer::file_entry::refused(ARCHIVE, &error)
                        })
                    });
                    written.await.map_err(|refusal| failed(refusal.message))?;
                    let to = around.path(to);
                    let copy = ["python3", "-I", "-c", COPY, ARCHIVE, source, &to, mode];
                    self.run_line(build, &target, &copy, &around).await.map(|()| true)
                }
                Action::Directory(_) => {
                    let path = around.directory.clone().unwrap_or_default();
                    let make = ["/bin/mkdir", "-p", path.as_str()];
                    let around =
                        StepEnvironment { directory: Some("/".to_owned()), ..around.clone() };
                    self.run_line(build, &target, &make, &around).await.map(|()| false)
                }
                Action::Environment(_) | Action::User(_) => Ok(false),
            };
            let ran = ran.map_err(|ended| match ended {
                LineEnd::Exit(code) => BuildFailure {
                    exit_code: Some(code),
                    ..failed(format!("`{title}` failed with exit code {code}"))
                },
                LineEnd::Broken(why) => failed(why),
            });
            let keeps = ran?;
            // A later failure is not that of a command that succeeded.
            build.begin_output();
            if keeps && let Err(refusal) = self.keep_layer(sandbox, &keys[at + 1], &around).await {
                // Later builds repeat the step.
                build.log("warn", &format!("`{title}` is not kept: {}", refusal.message));
            }
        }
        let late = BuildFailure::from;
        self.start(build, plan, &target, &around).await.map_err(late)?;
        let built = BuiltTemplate {
            id: build.id.clone(),
            template: build.template.clone(),
            // Set when the build is recorded.
            made: 0,
            unknown: UnknownFields::default(),
        };
        let names = build.tags.iter().flat_map(|tag| tagged(&build.template, tag)).collect();
        let keep = SnapshotOptions {
            names,
            built: Some(built),
            envs: around.envs,
            directory: around.directory,
            root: around.user.is_root(),
        };
        let record: SnapshotRecord =
            self.keep(sandbox, keep).await.map_err(|refusal| late(refusal.message))?;
        build.log("info", &format!("built {} ({} bytes)", record.names.join(", "), record.stored));
        Ok(())
    }

    /// Runs a program with its output in the log. An exit code other than 0 is an error.
    async fn run_line(
        &self,
        build: &Build,
        target: &CommandTarget,
        command: &[&str],
        around: &StepEnvironment,
    ) -> Result<(), LineEnd> {
        let wanted = json!({
            "op": around.user.start_operation(),
            "cmd": command[0],
            "args": command[1..],
            "envs": around.envs,
            "cwd": around.directory(),
            "stdin": false,
        });
        let keep = |stream: Stream, text: &str| build.keep_output(stream, text, true);
        match target.run(&wanted, BUILD_TIMEOUT, keep).await {
            Ok(0) => Ok(()),
            Ok(code) => Err(LineEnd::Exit(code)),
            Err(why) => Err(LineEnd::Broken(why)),
        }
    }

    /// Starts the template's own command, and waits until it is ready.
    async fn start(
        &self,
        build: &Build,
        plan: &BuildPlan,
        target: &CommandTarget,
        around: &StepEnvironment,
    ) -> Result<(), String> {
        let shell = |line: &str| {
            json!({
                "op": around.user.start_operation(),
                "cmd": "/bin/bash",
                "args": ["-l", "-c", line],
                "envs": around.envs,
                "cwd": around.directory(),
                "stdin": false,
            })
        };
        if let Some(line) = plan.start_cmd.as_deref().filter(|line| !line.is_empty()) {
            build.log("info", &format!("START {line}"));
            target.launch(shell(line)).await?;
        }
        let Some(line) = plan.ready_cmd.as_deref().filter(|line| !line.is_empty()) else {
            return Ok(());
        };
        build.log("info", &format!("READY {line}"));
        let begun = Instant::now();
        loop {
            let left = READY_TIMEOUT.saturating_sub(begun.elapsed());
            build.begin_output();
            let keep = |stream: Stream, text: &str| build.keep_output(stream, text, false);
            let tried = target.run(&shell(line), left, keep).await;
            match tried {
                Ok(0) => {
                    build.begin_output();
                    return Ok(());
                }
                _ if begun.elapsed() > READY_TIMEOUT => {
                    let limit = READY_TIMEOUT.as_secs();
                    let line = shortened(line);
                    return Err(format!("`{line}` did not succeed within {limit} s"));
                }
                _ => tokio::time::sleep(READY_INTERVAL).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::tests::{HOUR, config, make, open, options};

    #[tokio::test(flavor = "multi_thread")]
    async fn states_after_steps_make_room_for_snapshots() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(&dir);
        config.max_snapshots = 2;
        let all = open(&config).await;
        let sandbox = make(&all, options(HOUR)).await;
        let (user, envs) = (User::User, BTreeMap::new());
        let around = StepEnvironment { user, directory: None, envs };
        let layers = async || {
            let known = all.ledger.snapshots(&sandbox.tenant, 100).await.unwrap();
            known.iter().filter(|record| record.is_layer()).count()
        };
        // The oldest makes room for the others.
        for number in 0..4 {
            all.keep_layer(&sandbox, &format!("{LAYER}{number}"), &around).await.unwrap();
        }
        assert_eq!(layers().await, 2);
        for left in [1, 0] {
            let options = SnapshotOptions::of_sandbox(&sandbox, Vec::new());
            all.keep(&sandbox, options).await.unwrap();
            assert_eq!(layers().await, left);
        }
        let options = SnapshotOptions::of_sandbox(&sandbox, Vec::new());
        let refusal = all.keep(&sandbox, options).await.unwrap_err();
        assert_eq!(refusal.budget.unwrap().name, "max-snapshots");
        assert!(all.keep_layer(&sandbox, &format!("{LAYER}5"), &around).await.is_err());
    }

    #[test]
    fn a_line_is_shortened_for_messages() {
        assert_eq!(shortened(" true\n"), "true");
        let long = shortened(&"ä".repeat(1 << 20));
        assert_eq!(long.chars().count(), MAX_SHOWN_CHARS + 1);
        assert!(long.ends_with("ä\u{2026}"));
    }
}
