//! The builds of templates that a server knows: their progress, and the files that were uploaded
//! for them.
//!
//! Promises: a tenant has at most [`MAX_RUNNING`] builds that run, and others wait for them. The
//! server knows a bounded number of builds of a tenant, with bounded logs: ended ones are forgotten
//! first, then ones that were announced and never started. Uploaded files have no name on the disk:
//! they go with the process, or after [`UPLOAD_LIFETIME`].

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use afresh_interpreter::Stream;
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error_response::ErrorResponse;
use crate::failure::internal;
use crate::lock::lock;
use crate::sandbox::catalog::build_log::{BuildLog, LogEntry};
use crate::sandbox::catalog::template::Warm;
use crate::sandbox::lifecycle::random::random;

/// Maximum builds of a tenant that run.
const MAX_RUNNING: usize = 4;
/// Maximum builds of a tenant, with ended and announced ones.
const MAX_KNOWN: usize = 32;
/// Maximum bytes of the reason of a failed build.
const MAX_REASON_BYTES: usize = 16 << 10;
/// Maximum uploads of a tenant, and their bytes.
const MAX_UPLOADS: usize = 64;
const MAX_UPLOADED_BYTES: u64 = 1 << 30;
/// Time for which an uploaded file is kept.
const UPLOAD_LIFETIME: Duration = Duration::from_secs(60 * 60);
/// Maximum time for which a build waits for its start.
const START_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// A build.
pub(crate) struct Build {
    pub(crate) id: String,
    pub(crate) tenant: Arc<str>,
    /// The name of its template.
    pub(crate) template: String,
    pub(crate) tags: Vec<String>,
    progress: Mutex<Progress>,
}

struct Progress {
    stage: Stage,
    log: BuildLog,
    begun: Instant,
}

/// Why a build failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BuildFailure {
    /// For the tenant alone: it may quote a step, with its secrets.
    pub(crate) why: String,
    /// The number of the step.
    pub(crate) step: Option<usize>,
    /// The exit code of the command that failed.
    pub(crate) exit_code: Option<i64>,
}

impl From<String> for BuildFailure {
    /// The text may be an exception of the guest, so a long one is truncated.
    fn from(mut why: String) -> Self {
        why.truncate(why.floor_char_boundary(MAX_REASON_BYTES));
        why.shrink_to_fit();
        Self { why, ..Self::default() }
    }
}

/// Where a build is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// Its steps have not come yet.
    Waiting,
    Running,
    Ready,
    Failed(BuildFailure),
}

impl Build {
    /// Adds lines to the log.
    pub(crate) fn log(&self, level: &'static str, text: &str) {
        lock(&self.progress).log.add(level, text);
    }

    /// The output of the next command begins.
    pub(crate) fn begin_output(&self) {
        lock(&self.progress).log.begin_output();
    }

    /// Keeps output of a command for its failure. With `is_logged` it is in the log as well.
    pub(crate) fn keep_output(&self, stream: Stream, text: &str, is_logged: bool) {
        lock(&self.progress).log.keep_output(stream, text, is_logged);
    }

    /// Takes it up; `false` if that was done already.
    pub(crate) fn begin(&self) -> bool {
        let mut progress = lock(&self.progress);
        let waits = progress.stage == Stage::Waiting;
        if waits {
            progress.stage = Stage::Running;
        }
        waits
    }

    /// It has ended.
    pub(crate) fn end(&self, result: Result<(), BuildFailure>) {
        let mut progress = lock(&self.progress);
        progress.stage = match result {
            Ok(()) => Stage::Ready,
            Err(failure) => {
                progress.log.fail(&failure.why);
                Stage::Failed(failure)
            }
        };
    }

    /// It has ended without a result, if none is known.
    fn fail_if_running(&self) {
        if lock(&self.progress).stage == Stage::Running {
            self.end(Err("the build ended by a fault of the server".to_owned().into()));
        }
    }

    /// Whether its steps have not come.
    fn is_announced(&self) -> bool {
        lock(&self.progress).stage == Stage::Waiting
    }

    fn is_over(&self) -> bool {
        let progress = lock(&self.progress);
        match progress.stage {
            Stage::Waiting => progress.begun.elapsed() > START_TIMEOUT,
            Stage::Running => false,
            Stage::Ready | Stage::Failed(..) => true,
        }
    }

    /// Its status, with the entries of its log from `offset`.
    pub(crate) fn status(&self, offset: usize) -> Value {
        let progress = lock(&self.progress);
        let entries: Vec<&LogEntry> = progress.log.page(offset).collect();
        let stage = match progress.stage {
            Stage::Waiting => "waiting",
            Stage::Running => "building",
            Stage::Ready => "ready",
            Stage::Failed(..) => "error",
        };
        let mut said = json!({
            "templateID": self.template,
            "buildID": self.id,
            "status": stage,
            "logs": entries.iter().map(|entry| entry.text.as_str()).collect::<Vec<_>>(),
            "logEntries": entries.iter().map(|entry| entry.to_json()).collect::<Vec<_>>(),
        });
        if let Stage::Failed(BuildFailure { why, step, .. }) = &progress.stage {
            said["reason"] = progress.log.reason(why);
            if let Some(step) = step {
                // Clients count the base as the first.
                said["reason"]["step"] = (step + 1).to_string().into();
            }
        }
        said
    }
}

/// A build that runs, and has ended when this is dropped.
pub(crate) struct RunningBuild<'a>(pub(crate) &'a Build);

impl Drop for RunningBuild<'_> {
    fn drop(&mut self) {
        self.0.fail_if_running();
    }
}

/// A file for a step.
struct Upload {
    tenant: Arc<str>,
    files: String,
    /// The right to send the file.
    token: String,
    content: Option<UploadedFile>,
    /// When it expires.
    ends: Instant,
}

/// A file that was uploaded.
#[derive(Clone)]
pub(crate) struct UploadedFile {
    file: Arc<File>,
    bytes: u64,
}

impl UploadedFile {
    /// Its content. Blocks.
    pub(crate) fn read(&self) -> io::Result<Vec<u8>> {
        // Several builds may read it at the same time.
        let mut content = vec![0; usize::try_from(self.bytes).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut content, 0)?;
        Ok(content)
    }
}

impl Upload {
    fn is_for(&self, files: &str, token: &str) -> bool {
        !self.is_over()
            && self.files == files
            && crate::sandbox::http::keys::same(self.token.as_bytes(), token.as_bytes())
    }

    fn is_over(&self) -> bool {
        self.ends <= Instant::now()
    }

    /// It is used now.
    fn renew(&mut self) {
        self.ends = Instant::now() + UPLOAD_LIFETIME;
    }

    fn bytes(&self) -> u64 {
        self.content.as_ref().map_or(0, |content| content.bytes)
    }
}

fn invalid_link() -> ErrorResponse {
    ErrorResponse::new(
        StatusCode::FORBIDDEN,
        "the link is invalid or has expired; request a new one",
    )
}

/// An open image.
#[derive(Clone)]
pub(crate) struct ImageGuest {
    pub(crate) warm: Arc<Warm>,
    /// The template of the configuration whose options its sandboxes have.
    pub(crate) template: Arc<Warm>,
    /// Its reference with a digest.
    pub(crate) reference: String,
}

/// All builds, and the files for them.
#[derive(Default)]
pub(crate) struct Builds {
    known: Mutex<Vec<Arc<Build>>>,
    /// Places of running builds, by tenant.
    places: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
    uploads: Mutex<Vec<Upload>>,
    /// Open images, by the names that clients give them.
    pub(crate) images: Mutex<HashMap<String, ImageGuest>>,
    /// Images that were opened.
    pub(crate) opened_images: AtomicU64,
    /// The names of states after steps, oldest first, by tenant.
    pub(crate) layers: Mutex<HashMap<String, Vec<String>>>,
}

fn full(message: impl Into<String>) -> ErrorResponse {
    ErrorResponse::busy(StatusCode::TOO_MANY_REQUESTS, message)
}

/// A number as clients read it: a UUID of random bits.
fn build_number() -> Result<String, ErrorResponse> {
    let digits = random(16)?;
    let parts = [&digits[..8], &digits[8..12], &digits[13..16], &digits[17..20], &digits[20..]];
    let [first, second, third, fourth, last] = parts;
    Ok(format!("{first}-{second}-4{third}-8{fourth}-{last}"))
}

impl Builds {
    /// A new build of a template.
    pub(crate) fn add(
        &self,
        tenant: &Arc<str>,
        template: String,
        tags: Vec<String>,
    ) -> Result<Arc<Build>, ErrorResponse> {
        let id = build_number()?;
        let mut known = lock(&self.known);
        let own: Vec<Arc<Build>> =
            known.iter().filter(|build| build.tenant == *tenant).cloned().collect();
        if own.len() >= MAX_KNOWN {
            let over = own.iter().find(|build| build.is_over());
            // A client that announces builds and leaves must not stop the next.
            let oldest = over.or_else(|| own.iter().find(|build| build.is_announced()));
            let Some(oldest) = oldest else {
                return Err(full(format!(
                    "a tenant has at most {MAX_KNOWN} builds at the same time; try again when one has ended"
                )));
            };
            known.retain(|build| build.id != oldest.id);
        }
        let (stage, log) = (Stage::Waiting, BuildLog::default());
        let progress = Progress { stage, log, begun: Instant::now() };
        let tenant = tenant.clone();
        let build = Arc::new(Build { id, tenant, template, tags, progress: Mutex::new(progress) });
        known.push(build.clone());
        Ok(build)
    }

    /// A place of a build that runs, after the builds of the tenant before it.
    pub(crate) async fn place(&self, tenant: &Arc<str>) -> Option<OwnedSemaphorePermit> {
        let places = lock(&self.places)
            .entry(tenant.clone())
            .or_insert_with(|| Arc::new(Semaphore::new(MAX_RUNNING)))
            .clone();
        // Nothing closes it.
        places.acquire_owned().await.ok()
    }

    /// A build of a tenant.
    pub(crate) fn of(
        &self,
        tenant: &str,
        template: &str,
        id: &str,
    ) -> Result<Arc<Build>, ErrorResponse> {
        let is_it = |build: &&Arc<Build>| {
            build.id == id && *build.tenant == *tenant && build.template == template
        };
        lock(&self.known).iter().find(is_it).cloned().ok_or_else(|| {
            let message = format!("the build {id} of the template {template} was not found");
            ErrorResponse::new(StatusCode::NOT_FOUND, message)
        })
    }

    /// The token to send a file with, and whether the file is there.
    pub(crate) fn expect(
        &self,
        tenant: &Arc<str>,
        files: &str,
    ) -> Result<(String, bool), ErrorResponse> {
        let mut uploads = lock(&self.uploads);
        uploads.retain(|upload| !upload.is_over());
        let mut own = uploads.iter_mut().filter(|upload| upload.tenant == *tenant);
        if let Some(upload) = own.find(|upload| upload.files == files) {
            upload.renew();
            return Ok((upload.token.clone(), upload.content.is_some()));
        }
        if uploads.iter().filter(|upload| upload.tenant == *tenant).count() >= MAX_UPLOADS {
            return Err(full(format!("a tenant has at most {MAX_UPLOADS} uploads within an hour")));
        }
        let token = random(24)?;
        uploads.push(Upload {
            tenant: tenant.clone(),
            files: files.to_owned(),
            token: token.clone(),
            content: None,
            ends: Instant::now() + UPLOAD_LIFETIME,
        });
        Ok((token, false))
    }

    /// The tenant of a link. One without the token of an upload is refused.
    pub(crate) fn check_link(&self, files: &str, token: &str) -> Result<Arc<str>, ErrorResponse> {
        let uploads = lock(&self.uploads);
        let known = uploads.iter().find(|upload| upload.is_for(files, token));
        known.map(|upload| upload.tenant.clone()).ok_or_else(invalid_link)
    }

    /// Removes uploads that have expired.
    pub(crate) fn expire(&self) {
        lock(&self.uploads).retain(|upload| !upload.is_over());
    }

    /// Keeps a file, in `dir`.
    pub(crate) fn put(
        &self,
        dir: &Path,
        (files, token): (&str, &str),
        content: &[u8],
    ) -> Result<(), ErrorResponse> {
        let stored = store_upload(dir, content).map_err(|error| internal(&error))?;
        let mut uploads = lock(&self.uploads);
        let Some(at) = uploads.iter().position(|upload| upload.is_for(files, token)) else {
            return Err(invalid_link());
        };
        let tenant = uploads[at].tenant.clone();
        let others = uploads.iter().enumerate().filter(|(other, _)| *other != at);
        let held: u64 =
            others.filter(|(_, one)| one.tenant == tenant).map(|(_, one)| one.bytes()).sum();
        let bytes = content.len() as u64;
        if held.saturating_add(bytes) > MAX_UPLOADED_BYTES {
            return Err(full("a tenant uploads at most 1 GiB within an hour"));
        }
        let upload = &mut uploads[at];
        upload.content = Some(UploadedFile { file: stored.into(), bytes });
        upload.renew();
        Ok(())
    }

    /// An uploaded file.
    pub(crate) fn file(&self, tenant: &str, files: &str) -> Option<UploadedFile> {
        let is_it = |upload: &&Upload| {
            *upload.tenant == *tenant && upload.files == files && !upload.is_over()
        };
        lock(&self.uploads).iter().find(is_it).and_then(|upload| upload.content.clone())
    }
}

/// Writes a file without a name.
fn store_upload(dir: &Path, content: &[u8]) -> io::Result<File> {
    let path =
        dir.join(format!("upload-{}", random(8).map_err(|error| io::Error::other(error.message))?));
    let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.write_all(content)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_has_so_many_builds_and_sees_no_others() {
        let (builds, tenant) = (Builds::default(), Arc::<str>::from("t"));
        let add = || builds.add(&tenant, "a".to_owned(), vec!["default".to_owned()]);
        let all: Vec<_> = (0..MAX_KNOWN).map(|_| add().unwrap()).collect();
        assert!(all[0].begin() && !all[0].begin());
        // One that was never started makes room.
        let next = add().unwrap();
        assert!(builds.of("t", "a", &all[1].id).is_err());
        assert!(next.begin() && all[2..].iter().all(|build| build.begin()));
        assert_eq!(add().map(|build| build.id.clone()).unwrap_err().status, 429);
        all[0].end(Err(BuildFailure { step: Some(2), ..BuildFailure::from("no".to_owned()) }));
        let other = Arc::<str>::from("other");
        assert!(builds.add(&other, "a".to_owned(), Vec::new()).is_ok());
        assert!(builds.of("other", "a", &all[0].id).is_err());
        let failed = builds.of("t", "a", &all[0].id).unwrap().status(0);
        assert_eq!((&failed["status"], &failed["reason"]["step"]), (&json!("error"), &json!("3")));
        assert_eq!(failed["logs"], json!(["no"]));
        let long = add().unwrap();
        long.end(Err(BuildFailure::from("\u{e9}".repeat(8 << 20))));
        assert!(long.status(0).to_string().len() < 64 << 10);
        for _ in 0..2 * MAX_KNOWN {
            add().unwrap().end(Ok(()));
        }
        assert!(
            lock(&builds.known).len() <= MAX_KNOWN + 2 && builds.of("t", "a", &all[0].id).is_err()
        );
        assert_eq!(all[0].id.len(), 36);
    }

    #[test]
    fn a_build_that_panics_has_failed() {
        let builds = Builds::default();
        let build = builds.add(&"t".into(), "a".to_owned(), Vec::new()).unwrap();
        assert!(build.begin());
        let panics = std::panic::AssertUnwindSafe(|| {
            let _running = RunningBuild(&build);
            panic!("a fault of a step");
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(build.status(0)["status"], "error");
        // One with a result keeps it.
        let build = builds.add(&"t".into(), "a".to_owned(), Vec::new()).unwrap();
        assert!(build.begin());
        let running = RunningBuild(&build);
        build.end(Ok(()));
        drop(running);
        assert_eq!(build.status(0)["status"], "ready");
    }

    #[tokio::test]
    async fn a_tenant_with_many_builds_runs_a_few_and_delays_no_other() {
        let builds = Builds::default();
        let (tenant, other) = (Arc::<str>::from("t"), Arc::<str>::from("other"));
        let mut held = Vec::new();
        for _ in 0..MAX_RUNNING {
            held.push(builds.place(&tenant).await.unwrap());
        }
        let mut waiting = Box::pin(builds.place(&tenant));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        assert!(builds.place(&other).await.is_some());
        held.pop();
        assert!(waiting.await.is_some());
    }

    #[test]
    fn files_are_sent_with_the_token_of_their_link() {
        let dir = tempfile::tempdir().unwrap();
        let (builds, tenant) = (Builds::default(), Arc::<str>::from("t"));
        let (token, there) = builds.expect(&tenant, "0a").unwrap();
        assert!(!there && builds.put(dir.path(), ("0a", "guess"), b"x").is_err());
        builds.put(dir.path(), ("0a", &token), b"content").unwrap();
        assert_eq!(builds.expect(&tenant, "0a").unwrap(), (token, true));
        assert_eq!(builds.file("t", "0a").unwrap().read().unwrap(), b"content");
        assert!(builds.file("other", "0a").is_none());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_upload_that_has_expired_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (builds, tenant) = (Builds::default(), Arc::<str>::from("t"));
        let (token, _) = builds.expect(&tenant, "0a").unwrap();
        builds.put(dir.path(), ("0a", &token), b"content").unwrap();
        assert_eq!(builds.check_link("0a", &token).unwrap(), tenant);
        lock(&builds.uploads)[0].ends = Instant::now();
        assert!(builds.check_link("0a", &token).is_err());
        assert!(builds.put(dir.path(), ("0a", &token), b"later").is_err());
        assert!(builds.file("t", "0a").is_none());
        builds.expire();
        assert!(lock(&builds.uploads).is_empty());
    }
}
