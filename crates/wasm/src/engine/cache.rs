//! A directory of compiled guests, kept between runs.
//!
//! A file in it is native code, trusted as much as the program itself, so the directory must be the
//! embedder's own; it is off by default. An engine refuses a directory that other users can write
//! to, and a file of another user or one that others can write to is made anew. So is a file of
//! another wasmtime or another configuration. A cache that cannot be written makes the next start
//! slower, nothing else. May break it: an access control list that gives others the right to write.

use std::fs::DirBuilder;
use std::io::{self, Write};
#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::Builder;
use wasmtime::component::Component;
use wasmtime::{Engine, Module};

use crate::error::LoadError;

/// Permissions of others than the owner to write.
#[cfg(unix)]
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Users remove and replace only their own files.
#[cfg(unix)]
const STICKY: u32 = 0o1000;

/// The cache in a directory.
pub(crate) struct Cache<'a> {
    directory: &'a Path,
    /// Whether its files belong to the installed program, whose owner is trusted.
    is_installed: bool,
}

/// Fails where other users can replace the files of a directory, except root. A directory that does
/// not exist is made later, for this user alone.
#[cfg(unix)]
pub(crate) fn check_directory(directory: &Path) -> Result<(), LoadError> {
    let Ok(about) = std::fs::metadata(directory) else { return Ok(()) };
    let (owner, mode) = (about.uid(), about.mode());
    let own = rustix::process::geteuid().as_raw();
    match is_private(owner, mode, own) || (owner == 0 && mode & STICKY != 0) {
        true => Ok(()),
        false => {
            let directory = directory.to_owned();
            Err(LoadError::SharedCache { directory, owner, mode: mode & 0o7777 })
        }
    }
}

/// Other systems have no such modes.
#[cfg(not(unix))]
#[expect(clippy::unnecessary_wraps, reason = "as on Unix")]
pub(crate) fn check_directory(_: &Path) -> Result<(), LoadError> {
    Ok(())
}

/// Whether only the user `own` and root can write to a file of `owner` with `mode`.
#[cfg(unix)]
fn is_private(owner: u32, mode: u32, own: u32) -> bool {
    (owner == own || owner == 0) && mode & WRITABLE_BY_OTHERS == 0
}

impl<'a> Cache<'a> {
    pub(crate) fn new(directory: &'a Path) -> Self {
        Self { directory, is_installed: false }
    }

    /// The cache in a directory of the installed program: other users may own it, as they own the
    /// program.
    pub(crate) fn installed(directory: &'a Path) -> Self {
        Self { directory, is_installed: true }
    }

    fn path(&self, key: &blake3::Hash, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", key.to_hex()))
    }

    /// The file kept under `key`, if it is there and no other user wrote it. The files of a shared
    /// directory such as `/tmp` may be anyone's.
    fn find(&self, key: &blake3::Hash, kind: &str) -> Option<PathBuf> {
        let path = self.path(key, kind);
        #[cfg(unix)]
        {
            let about = std::fs::metadata(&path).ok()?;
            let own = rustix::process::geteuid().as_raw();
            (self.is_installed || is_private(about.uid(), about.mode(), own)).then_some(path)
        }
        #[cfg(not(unix))]
        Some(path)
    }

    /// The module kept under `key`.
    pub(crate) fn module(&self, engine: &Engine, key: &blake3::Hash) -> Option<Module> {
        // SAFETY: the directory is the embedder's own, as `EngineConfig::cache` demands.
        unsafe { Module::deserialize_file(engine, self.find(key, "cwasm")?) }.ok()
    }

    pub(crate) fn keep_module(&self, key: &blake3::Hash, module: &Module) {
        if let Ok(code) = module.serialize() {
            self.keep(key, "cwasm", &code);
        }
    }

    /// Stores the value of `key` under another as well, at the cost of a name.
    pub(crate) fn also_as(&self, key: &blake3::Hash, other: &blake3::Hash) {
        // There already, or made anew at the next start.
        let _ = std::fs::hard_link(self.path(key, "cwasm"), self.path(other, "cwasm"));
    }

    /// The component kept under `key`.
    pub(crate) fn component(&self, engine: &Engine, key: &blake3::Hash) -> Option<Component> {
        // SAFETY: the directory is the embedder's own, as `EngineConfig::cache` demands.
        unsafe { Component::deserialize_file(engine, self.find(key, "cwasm")?) }.ok()
    }

    pub(crate) fn keep_component(&self, key: &blake3::Hash, component: &Component) {
        if let Ok(code) = component.serialize() {
            self.keep(key, "cwasm", &code);
        }
    }

    /// The value that [`Cache::keep_value`] stored under `key` and `kind`; `None` if it is missing
    /// or damaged.
    pub(crate) fn value<T: DeserializeOwned>(&self, key: &blake3::Hash, kind: &str) -> Option<T> {
        let file = std::fs::read(self.find(key, kind)?).ok()?;
        let (digest, bytes) = file.split_first_chunk::<{ blake3::OUT_LEN }>()?;
        (blake3::hash(bytes) == *digest).then(|| postcard::from_bytes(bytes).ok())?
    }

    /// Keeps a value with its digest, so that one which a disk has damaged is made anew. The cache
    /// trusts everyone who can write to the directory: see above.
    pub(crate) fn keep_value(&self, key: &blake3::Hash, kind: &str, value: &impl Serialize) {
        if let Ok(bytes) = postcard::to_allocvec(value) {
            let digest = blake3::hash(&bytes);
            self.keep(key, kind, &[digest.as_bytes(), bytes.as_slice()].concat());
        }
    }

    /// Keeps `bytes`. A file appears whole and durable under a name that no other writer has, and
    /// is never written again: others may have it mapped.
    fn keep(&self, key: &blake3::Hash, kind: &str, bytes: &[u8]) {
        let path = self.path(key, kind);
        let kept = || -> io::Result<()> {
            let mut directory = DirBuilder::new();
            #[cfg(unix)]
            directory.mode(0o700);
            directory.recursive(true).create(self.directory)?;
            let mut file =
                Builder::new().prefix(".tmp-").rand_bytes(20).tempfile_in(self.directory)?;
            file.write_all(bytes)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|e| e.error)?;
            Ok(())
        };
        // Without it the next start is slower.
        let _ = kept();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_or_truncated_value_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path());
        let key = blake3::hash(b"a guest");
        let value = vec![7_u32, 8, 9];
        cache.keep_value(&key, "plan", &value);
        assert_eq!(cache.value(&key, "plan"), Some(value.clone()));
        assert_eq!(cache.value::<Vec<u32>>(&key, "other"), None);
        let whole = std::fs::read(cache.path(&key, "plan")).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(cache.path(&key, "plan"), &whole[..cut]).unwrap();
            assert_eq!(cache.value::<Vec<u32>>(&key, "plan"), None, "cut to {cut} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(cache.path(&key, "plan"), &damaged).unwrap();
            assert_eq!(cache.value::<Vec<u32>>(&key, "plan"), None, "byte {at} damaged");
        }
        cache.keep_value(&key, "plan", &value);
        assert_eq!(cache.value(&key, "plan"), Some(value));
    }

    /// Only root can give a file to another user.
    #[cfg(unix)]
    #[test]
    fn files_that_other_users_wrote_or_can_write_are_not_used() {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;

        let own = rustix::process::geteuid().as_raw();
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path());
        let key = blake3::hash(b"a guest");
        let engine = Engine::default();
        cache
            .keep_module(&key, &Module::new(&engine, wat::parse_str("(module)").unwrap()).unwrap());
        cache.keep_value(&key, "plan", &7_u32);
        let is_used =
            || [cache.module(&engine, &key).is_some(), cache.value::<u32>(&key, "plan").is_some()];
        assert_eq!(is_used(), [true; 2]);
        let files = ["cwasm", "plan"].map(|kind| cache.path(&key, kind));
        for mode in [0o620, 0o602] {
            files
                .iter()
                .for_each(|f| std::fs::set_permissions(f, Permissions::from_mode(mode)).unwrap());
            assert_eq!(is_used(), [false; 2], "{mode:o}");
            assert!(Cache::installed(dir.path()).module(&engine, &key).is_some());
        }
        files
            .iter()
            .for_each(|f| std::fs::set_permissions(f, Permissions::from_mode(0o644)).unwrap());
        assert_eq!(is_used(), [true; 2]);
        if own == 0 {
            files.iter().for_each(|f| std::os::unix::fs::chown(f, Some(1234), None).unwrap());
            assert_eq!(is_used(), [false; 2], "of another user");
        }
        for (owner, mode, private) in
            [(own, 0o755, true), (own, 0o775, false), (0, 0o700, true), (own + 1, 0o700, false)]
        {
            assert_eq!(is_private(owner, mode, own), private, "{mode:o} of {owner}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_engine_refuses_a_cache_that_other_users_can_write_to() {
        use std::fs::Permissions;
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let of = |cache: &Path| {
            let config = crate::EngineConfig { cache: Some(cache.into()), ..Default::default() };
            crate::Engine::new(config).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(of(&dir.path().join("made later")), Ok(()));
        assert_eq!(of(dir.path()), Ok(()));
        for mode in [0o777, 0o770] {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            let refused = of(dir.path()).unwrap_err();
            assert!(refused.contains(&format!("mode {mode:o}")), "{refused}");
        }
    }

    #[test]
    fn writers_of_one_entry_never_change_what_others_have_open() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path());
        let key = blake3::hash(b"a guest");
        let content = |n: u8| vec![n; 300_000];
        cache.keep(&key, "state", &content(0));
        std::thread::scope(|scope| {
            for n in 0..2 {
                let cache = &cache;
                scope.spawn(move || {
                    (0..50).for_each(|_| cache.keep(&key, "state", &content(n)));
                });
            }
            for _ in 0..200 {
                // Like a mapping of the file, this sees later writes to it.
                let file = std::fs::File::open(cache.path(&key, "state")).unwrap();
                let mut first = [0];
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut first, 0).unwrap();
                std::thread::yield_now();
                let mut all = Vec::new();
                std::io::Read::read_to_end(&mut &file, &mut all).unwrap();
                assert!(all == content(first[0]), "the file was written while it was open");
            }
        });
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left behind");
    }
}
