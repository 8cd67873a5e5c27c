//! Third-party artifacts of test builds in the user's cache folder, so that another checkout does
//! not compile them again.
//!
//! The folder has what cargo needs to find the artifacts of the last complete build fresh: files of
//! `deps`, output of build scripts, and fingerprints. Cargo compares a fingerprint with the version
//! of the compiler, profile, features and dependencies, so a restored artifact that does not fit is
//! compiled as without a cache. A cache that cannot be read or written is reported, and a build
//! works the same without it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::host;

/// The folder in the user's cache folder.
const NAME: &str = "afresh-build";
/// The folders of a profile. Fingerprints are last: cargo believes them.
const FOLDERS: [&str; 3] = ["deps", "build", ".fingerprint"];
/// Hexadecimal digits at the end of the name of an artifact, different for each version.
const HASH_LENGTH: usize = 16;

/// The cache, and the target folder of one profile.
#[derive(Debug)]
pub(crate) struct ArtifactCache {
    folder: PathBuf,
    profile: PathBuf,
}

impl ArtifactCache {
    /// The one for tests of this user; none where the user has no cache folder.
    pub(crate) fn of_user() -> Option<Self> {
        let own = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let own = own.filter(|folder| folder.is_absolute());
        let caches =
            own.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
        let profile = host::target_folder().join("debug");
        caches.is_dir().then(|| Self { folder: caches.join(NAME), profile })
    }

    /// Brings the stored artifacts to the target folder; returns their number.
    ///
    /// Cargo compiles an artifact again if one that it depends on is newer. So each replaces the
    /// one with its name, also that of a build before.
    pub(crate) fn restore(&self) -> Result<usize> {
        let stored = self.folder.join("artifacts");
        if !stored.is_dir() {
            return Ok(0);
        }
        let lock = self.lock()?;
        lock.lock_shared().context("cannot lock the cache")?;
        copy(&stored, &self.profile, |_| true)
    }

    /// Stores the artifacts with these hashes instead of the present ones; returns their number.
    /// Does nothing if the present ones have the same hashes, or another process writes.
    pub(crate) fn save(&self, hashes: &BTreeSet<String>) -> Result<usize> {
        fs::create_dir_all(&self.folder).with_context(|| self.folder.display().to_string())?;
        let list: String = hashes.iter().map(|hash| format!("{hash}\n")).collect();
        let listed = self.folder.join("hashes");
        if fs::read_to_string(&listed).is_ok_and(|stored| stored == list) {
            return Ok(0);
        }
        let lock = self.lock()?;
        if lock.try_lock().is_err() {
            return Ok(0);
        }
        // Until the list is written, a save that was cut off is repeated.
        remove(&listed)?;
        let artifacts = self.folder.join("artifacts");
        let new = self.folder.join("artifacts.new");
        remove(&new)?;
        let wanted = |name: &str| hash(name).is_some_and(|hash| hashes.contains(hash));
        let copied = copy(&self.profile, &new, wanted)?;
        remove(&artifacts)?;
        fs::rename(&new, &artifacts).with_context(|| artifacts.display().to_string())?;
        fs::write(&listed, list).with_context(|| listed.display().to_string())?;
        Ok(copied)
    }

    fn lock(&self) -> Result<File> {
        let path = self.folder.join("lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        file.with_context(|| path.display().to_string())
    }
}

/// The hash in the name of an artifact (`libserde-0123456789abcdef.rlib`), or of its folder.
pub(crate) fn hash(name: &str) -> Option<&str> {
    let stem = name.split('.').find(|part| !part.is_empty())?;
    let (_, hash) = stem.rsplit_once('-')?;
    let is_hash = hash.len() == HASH_LENGTH && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then_some(hash)
}

/// Copies the entries with a wanted name from the folders of a profile; returns their number.
fn copy(from: &Path, to: &Path, wanted: impl Fn(&str) -> bool) -> Result<usize> {
    let mut copied = 0;
    for folder in FOLDERS {
        let (source, target) = (from.join(folder), to.join(folder));
        fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
        for entry in fs::read_dir(&source).with_context(|| source.display().to_string())? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(&wanted) {
                copy_entry(&entry.path(), &target.join(entry.file_name()))?;
                copied += 1;
            }
        }
    }
    Ok(copied)
}

/// Copies a file with its time, or a folder, in place of `to`.
fn copy_entry(from: &Path, to: &Path) -> Result<()> {
    remove(to)?;
    let metadata = from.symlink_metadata().with_context(|| from.display().to_string())?;
    if metadata.is_dir() {
        fs::create_dir(to).with_context(|| to.display().to_string())?;
        for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
            let entry = entry?;
            copy_entry(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    if metadata.is_symlink() {
        let target = fs::read_link(from).with_context(|| from.display().to_string())?;
        return std::os::unix::fs::symlink(target, to).with_context(|| to.display().to_string());
    }
    // A compiler replaces libraries by new files, and they have nearly all bytes. Other files are
    // written in place.
    let is_library = from
        .extension()
        .is_some_and(|kind| ["rlib", "rmeta", "so"].map(AsRef::as_ref).contains(&kind));
    if is_library && fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    let copy = || {
        fs::copy(from, to)?;
        File::open(to)?.set_modified(metadata.modified()?)
    };
    copy().with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Removes a file or a folder, which may be missing.
fn remove(path: &Path) -> Result<()> {
    let removed = match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => Err(error),
    };
    removed.with_context(|| format!("cannot remove {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    const OWN_HASH: &str = "0123456789abcdef";
    const OTHER_HASH: &str = "fedcba9876543210";

    fn write(file: PathBuf, text: &str, seconds: u64) {
        fs::create_dir_all(file.parent().expect("a folder")).expect("created");
        fs::write(&file, text).expect("written");
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let file = File::options().write(true).open(file).expect("opened");
        file.set_modified(time).expect("its time");
    }

    #[test]
    fn wanted_artifacts_come_back_with_their_times_and_replace_newer_ones() {
        let scratch = std::env::temp_dir().join(format!("afresh-cache-{}", std::process::id()));
        let checkout = |name| scratch.join(name);
        let cache = |profile| ArtifactCache { folder: checkout("cache"), profile };
        let one = cache(checkout("one"));
        assert_eq!(one.restore().expect("an empty cache is no error"), 0);
        for hash in [OWN_HASH, OTHER_HASH] {
            write(one.profile.join(format!("deps/libthird-{hash}.rlib")), "third", 5);
            write(one.profile.join(format!("build/third-{hash}/out/a/table.rs")), "table", 4);
            write(one.profile.join(format!(".fingerprint/third-{hash}/lib-third")), "print", 6);
        }
        let hashes = BTreeSet::from([OWN_HASH.to_owned()]);
        assert_eq!(one.save(&hashes).expect("saved"), 3);
        assert_eq!(one.save(&hashes).expect("nothing to save"), 0);

        let two = cache(checkout("two"));
        let library = two.profile.join(format!("deps/libthird-{OWN_HASH}.rlib"));
        write(library.clone(), "newer", 9);
        assert_eq!(two.restore().expect("restored"), 3);
        assert_eq!(fs::read_to_string(&library).expect("there"), "third");
        let print = two.profile.join(format!(".fingerprint/third-{OWN_HASH}/lib-third"));
        for (file, seconds) in [(library, 5), (print, 6)] {
            let time = file.metadata().and_then(|metadata| metadata.modified()).expect("a time");
            assert_eq!(time, SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        }
        assert!(two.profile.join(format!("build/third-{OWN_HASH}/out/a/table.rs")).is_file());
        assert!(!two.profile.join(format!("build/third-{OTHER_HASH}")).exists());
        fs::remove_dir_all(&scratch).expect("removed");
    }

    #[test]
    fn the_hash_of_an_artifact_is_at_the_end_of_its_name() {
        assert_eq!(hash(&format!("libserde_json-{OWN_HASH}.rlib")), Some(OWN_HASH));
        assert_eq!(hash(&format!("zstd-sys-{OWN_HASH}")), Some(OWN_HASH));
        assert_eq!(hash(&format!("a-{OWN_HASH}.1x2y.rcgu.o")), Some(OWN_HASH));
        assert_eq!(hash("build-script-build"), None);
        assert_eq!(hash("libafresh.rlib"), None);
    }
}
