//! Saving: a warm guest, or its state after calls, becomes a snapshot in a directory, an archive or a remote.

use afresh_memory::{Feature, Features, Image, PageRange};
use afresh_pager::{Recorder, SnapshotOptions};
#[cfg(feature = "remote")]
use afresh_store::remote::{Remote, RemoteError, Replaced};
use afresh_store::{Encoding, FoldOptions, Journal, Sha256, Snapshot, Store, Turn, archive};

use crate::guest::Backend;
use crate::lease::Instance;
use crate::scratch::Scratch;
use crate::{
    Call, Cause, Guest, LATEST, Lease, Options, Place, Reference, ReferenceError, SaveError, access,
};

/// How a guest is saved.
#[derive(Clone, Debug)]
#[must_use]
pub struct SaveOptions {
    encoding: Encoding,
    record: Vec<Call>,
    #[cfg(feature = "seal")]
    sign: Option<afresh_store::seal::SigningKey>,
    #[cfg(feature = "seal")]
    seal: Option<afresh_store::seal::SealKey>,
}

impl Default for SaveOptions {
    fn default() -> Self {
        Self {
            encoding: Encoding::Raw,
            record: Vec::new(),
            #[cfg(feature = "seal")]
            sign: None,
            #[cfg(feature = "seal")]
            seal: None,
        }
    }
}

impl SaveOptions {
    /// Pages as they are, no working set, neither signed nor sealed.
    pub fn new() -> Self {
        Self::default()
    }

    /// How pages are stored: raw ones are faster to open here, compressed ones travel well.
    pub fn encoding(mut self, encoding: Encoding) -> Self {
        self.encoding = encoding;
        self
    }

    /// Adds a call to learn the working set from: its pages, starting warm, are read first when the snapshot is
    /// opened.
    pub fn record(mut self, call: Call) -> Self {
        self.record.push(call);
        self
    }

    /// Signs the snapshot.
    #[cfg(feature = "seal")]
    pub fn sign(mut self, key: afresh_store::seal::SigningKey) -> Self {
        self.sign = Some(key);
        self
    }

    /// Seals the snapshot: it cannot be read or changed without the key.
    #[cfg(feature = "seal")]
    pub fn seal(mut self, key: afresh_store::seal::SealKey) -> Self {
        self.seal = Some(key);
        self
    }

    fn with(&self, parent: Option<Parent>) -> SnapshotOptions {
        let (parent, changed) = match parent {
            Some(Parent { snapshot, changed }) => (Some(snapshot), Some(changed)),
            None => (None, None),
        };
        SnapshotOptions {
            encoding: self.encoding,
            parent,
            changed,
            working_set: Vec::new(),
            #[cfg(feature = "seal")]
            seal: self.seal.clone(),
            #[cfg(feature = "seal")]
            sign: self.sign.clone(),
        }
    }

    /// Whether they bring a key to seal with.
    pub(crate) fn seals(&self) -> bool {
        #[cfg(feature = "seal")]
        let seals = self.seal.is_some();
        #[cfg(not(feature = "seal"))]
        let seals = false;
        seals
    }

    /// Whether they define the form of a snapshot, so that an existing one cannot be continued.
    pub(crate) fn shapes(&self) -> bool {
        #[cfg(feature = "seal")]
        if self.sign.is_some() || self.seal.is_some() {
            return true;
        }
        self.encoding != Encoding::Raw || !self.record.is_empty()
    }

    /// Appends a turn, signed if required.
    pub(crate) fn append(
        &self,
        journal: &mut Journal,
        turn: &Turn,
    ) -> Result<u64, afresh_store::SaveError> {
        #[cfg(feature = "seal")]
        if let Some(key) = &self.sign {
            return journal.append(turn, Some(&|root| key.sign_turn(root)));
        }
        journal.append(turn, None)
    }

    /// How turns are folded.
    pub(crate) fn fold(&self) -> FoldOptions {
        FoldOptions {
            encoding: self.encoding,
            #[cfg(feature = "seal")]
            sign: self.sign.clone(),
            ..FoldOptions::default()
        }
    }

    /// The requirements of the new snapshot on its readers. A delta is sealed like its parent, with the key that
    /// opened that.
    #[cfg(feature = "seal")]
    pub(crate) fn own_access(&self, options: &Options) -> access::Access {
        match &self.seal {
            Some(key) => access::Access::new().with_key(key.clone()),
            None => options.access.clone(),
        }
    }

    #[cfg(not(feature = "seal"))]
    pub(crate) fn own_access(&self, options: &Options) -> access::Access {
        options.access.clone()
    }
}

/// A snapshot that was saved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Saved {
    /// Its id in the place it was saved to.
    pub id: Sha256,
    /// The snapshot.
    pub snapshot: Snapshot,
    /// The reason why no working set was recorded, though calls were given: the missing feature of this host.
    pub unrecorded: Option<&'static str>,
}

/// The snapshot that a delta follows on.
pub(crate) struct Parent {
    snapshot: Snapshot,
    /// The pages that differ from it.
    changed: Vec<PageRange>,
}

/// A frozen guest of any kind.
pub(crate) enum Frozen {
    #[cfg(feature = "wasm")]
    Module(afresh_wasm::Frozen),
    #[cfg(feature = "vm")]
    Machine(afresh_vm::Frozen),
    #[cfg(feature = "linux")]
    Program(afresh_linux::Frozen),
}

impl Frozen {
    /// Its pages.
    pub(crate) fn image(&self) -> &Image {
        match self {
            #[cfg(feature = "wasm")]
            Self::Module(frozen) => frozen.memory().pages(),
            #[cfg(feature = "vm")]
            Self::Machine(frozen) => frozen.memory().pages(),
            #[cfg(feature = "linux")]
            Self::Program(frozen) => frozen.memory().pages(),
        }
    }

    /// Everything else, in the form of snapshots.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, Cause> {
        Ok(match self {
            #[cfg(feature = "wasm")]
            Self::Module(frozen) => frozen.bytes()?,
            #[cfg(feature = "vm")]
            Self::Machine(frozen) => frozen.bytes()?,
            #[cfg(feature = "linux")]
            Self::Program(frozen) => frozen.bytes().to_vec(),
        })
    }

    /// The same without times: equal states have equal ones.
    pub(crate) fn timeless_bytes(&self) -> Result<Vec<u8>, Cause> {
        match self {
            #[cfg(feature = "wasm")]
            Self::Module(frozen) => Ok(frozen.timeless_bytes()?),
            #[allow(unreachable_patterns, reason = "without the others there is none")]
            _ => self.bytes(),
        }
    }

    fn pages(&self) -> usize {
        self.image().pages()
    }

    fn save(&self, store: &Store, name: &str, with: &SnapshotOptions) -> Result<Sha256, Cause> {
        Ok(match self {
            #[cfg(feature = "wasm")]
            Self::Module(frozen) => frozen.save(store, name, with)?,
            #[cfg(feature = "vm")]
            Self::Machine(frozen) => frozen.save(store, name, with)?,
            #[cfg(feature = "linux")]
            Self::Program(frozen) => frozen.save(store, name, with)?,
        })
    }

    /// Requirements of a recording of the working set of such a guest.
    fn recorder(&self) -> Feature {
        match self {
            #[cfg(feature = "wasm")]
            Self::Module(_) => Feature::UffdSigbus,
            #[cfg(feature = "vm")]
            Self::Machine(_) => Feature::UffdKernel,
            #[cfg(feature = "linux")]
            Self::Program(_) => Feature::UffdSigbus,
        }
    }

    /// The pages that one call touches in a new guest that starts warm.
    fn touched(
        &self,
        snapshot: Snapshot,
        call: &Call,
        options: &Options,
    ) -> Result<Vec<PageRange>, Cause> {
        match self {
            #[cfg(feature = "wasm")]
            Self::Module(_) => {
                let frozen = afresh_wasm::Frozen::record(snapshot)?;
                let ready = crate::guest::thaw_wasm(&frozen, options)?;
                let guest = Guest::assemble(ready, options);
                guest.ask(call)?;
                Ok(frozen.memory().touched())
            }
            #[cfg(feature = "vm")]
            Self::Machine(_) => {
                let frozen = afresh_vm::Frozen::record(snapshot)?;
                let sandbox = options.builder().thaw(&frozen)?;
                let machines = crate::machine::machines(sandbox, options)?;
                let guest = Guest::assemble(Backend::Machine(Box::new(machines)), options);
                guest.ask(call)?;
                Ok(frozen.memory().touched())
            }
            #[cfg(feature = "linux")]
            Self::Program(_) => {
                let frozen = afresh_linux::Frozen::record(snapshot)?;
                let grants = options.grants();
                let warm = afresh_linux::Warm::thaw(&frozen, &grants)?;
                let guest = Guest::assemble(crate::program::programs(warm, options)?, options);
                guest.ask(call)?;
                Ok(frozen.memory().touched())
            }
        }
    }

    /// Pages at the beginning that are left out of working sets: a module is only read to be compiled, and
    /// that takes longer than fetching it.
    fn skipped(&self) -> usize {
        match self {
            #[cfg(feature = "wasm")]
            Self::Module(frozen) => frozen.module_pages().end(),
            #[cfg(feature = "vm")]
            Self::Machine(_) => 0,
            #[cfg(feature = "linux")]
            Self::Program(_) => 0,
        }
    }

    /// The pages that `calls` touch, each in a new guest that starts warm.
    fn record(&self, calls: &[Call], options: &Options) -> Result<Vec<PageRange>, SaveError> {
        let write = |source: Cause| SaveError::Write {
            reference: "a copy to record from".to_owned(),
            source,
        };
        let scratch = Scratch::new()?;
        let store = Store::create(scratch.path()).map_err(|e| write(e.into()))?;
        let id = self.save(&store, "recorded", &SnapshotOptions::default()).map_err(write)?;
        let snapshot = store.load_id(id).map_err(|e| write(e.into()))?;
        let mut recorder = Recorder::new();
        for call in calls {
            let touched = self.touched(snapshot.clone(), call, options).map_err(|source| {
                SaveError::Record { function: call.function().to_owned(), source }
            })?;
            recorder.add(&touched);
        }
        let skipped = self.skipped();
        let after = |run: PageRange| {
            let start = run.start.max(skipped);
            (start < run.end()).then(|| PageRange::new(start, run.end() - start))
        };
        // All pages that one of them touches, since the caller chose the calls.
        Ok(recorder.pages(0.0).into_iter().filter_map(after).collect())
    }

    /// The options of the save, and the reason why a requested working set was not recorded.
    fn with(
        &self,
        parent: Option<Parent>,
        options: &SaveOptions,
        opened: &Options,
    ) -> Result<(SnapshotOptions, Option<&'static str>), SaveError> {
        let mut with = options.with(parent);
        let mut unrecorded = None;
        if !options.record.is_empty() {
            let needed = self.recorder();
            if Features::host().has(needed) {
                with.working_set = self.record(&options.record, &quiet(opened))?;
            } else {
                unrecorded = Some(needed.name());
            }
        }
        Ok((with, unrecorded))
    }

    /// Saves it in a remote in place of `replaced`, with turns to follow.
    #[cfg(feature = "remote")]
    pub(crate) fn write_turns(
        &self,
        to: &Reference,
        options: &SaveOptions,
        opened: &Options,
        replaced: Replaced<'_>,
    ) -> Result<Journal, SaveError> {
        self.send(to, options, opened, |remote, store, snapshot, name, encoding| {
            remote.push_turns(store, snapshot, name, encoding, replaced, &mut |_| {})
        })
    }

    /// Saves it in a remote in place of `replaced`.
    #[cfg(feature = "remote")]
    pub(crate) fn write_over(
        &self,
        to: &Reference,
        options: &SaveOptions,
        opened: &Options,
        replaced: Replaced<'_>,
    ) -> Result<Sha256, SaveError> {
        self.send(to, options, opened, |remote, store, snapshot, name, encoding| {
            remote.push_over(store, snapshot, name, encoding, replaced, &mut |_| {})
        })
    }

    /// Saves it in a scratch directory, and sends it from there.
    #[cfg(feature = "remote")]
    fn send<T>(
        &self,
        to: &Reference,
        options: &SaveOptions,
        opened: &Options,
        send: impl FnOnce(&Remote, &Store, &Snapshot, &str, Encoding) -> Result<T, RemoteError>,
    ) -> Result<T, SaveError> {
        let name = target(to)?;
        let failed = |source: Cause| SaveError::Write { reference: to.to_string(), source };
        let (with, _) = self.with(None, options, opened)?;
        let scratch = Scratch::new()?;
        let store = Store::create(scratch.path()).map_err(|e| failed(e.into()))?;
        let id = self.save(&store, name, &with).map_err(failed)?;
        let own = options.own_access(opened);
        let snapshot = access::load(&store, &id.to_string(), &own).map_err(|e| failed(e.into()))?;
        let remote = to.place().remote()?;
        let sent = send(&remote, &store, &snapshot, name, with.encoding);
        sent.map_err(|e| failed(e.into()))
    }

    /// Saves it as `to`.
    pub(crate) fn write(
        &self,
        to: &Reference,
        parent: Option<Parent>,
        options: &SaveOptions,
        opened: &Options,
    ) -> Result<Saved, SaveError> {
        let name = target(to)?;
        let (with, unrecorded) = self.with(parent, options, opened)?;
        let failed = |source: Cause| SaveError::Write { reference: to.to_string(), source };
        let own = options.own_access(opened);
        let save = |store: &Store, name: &str| {
            let id = self.save(store, name, &with)?;
            access::load(store, &id.to_string(), &own).map_err(Cause::from)
        };
        let (id, snapshot) = match to.place() {
            Place::Directory(_) => {
                let snapshot = save(&to.place().create()?, name).map_err(failed)?;
                (snapshot.id(), snapshot)
            }
            Place::Remote(_) => {
                let scratch = Scratch::new()?;
                let store = Store::create(scratch.path()).map_err(|e| failed(e.into()))?;
                let snapshot = save(&store, name).map_err(failed)?;
                (push(to, &store, &snapshot, name, with.encoding)?, snapshot)
            }
            Place::File(path) => {
                let scratch = Scratch::new()?;
                let store = Store::create(scratch.path()).map_err(|e| failed(e.into()))?;
                let snapshot = save(&store, LATEST).map_err(failed)?;
                archive::export(&snapshot, path, Some(LATEST)).map_err(|e| failed(e.into()))?;
                (snapshot.id(), snapshot)
            }
        };
        Ok(Saved { id, snapshot, unrecorded })
    }
}

#[cfg(feature = "remote")]
fn push(
    to: &Reference,
    store: &Store,
    snapshot: &Snapshot,
    name: &str,
    encoding: Encoding,
) -> Result<Sha256, SaveError> {
    let pushed = to.place().remote()?.push(store, snapshot, name, encoding, &mut |_| {});
    pushed.map_err(|e| SaveError::Write { reference: to.to_string(), source: e.into() })
}

#[cfg(not(feature = "remote"))]
fn push(
    to: &Reference,
    _: &Store,
    _: &Snapshot,
    _: &str,
    _: Encoding,
) -> Result<Sha256, SaveError> {
    Err(crate::OpenError::Feature { what: to.to_string(), feature: "remote" }.into())
}

/// The name to save under. A file has one snapshot, which needs no other.
fn target(to: &Reference) -> Result<&str, ReferenceError> {
    if let (Place::File(path), Some(name)) = (to.place(), to.given_name()) {
        return Err(ReferenceError::Single { path: path.clone(), name: name.to_owned() });
    }
    to.target(LATEST)
}

/// The same options for a guest that runs behind the scenes.
fn quiet(options: &Options) -> Options {
    let options = options.clone();
    #[cfg(feature = "wasm")]
    let options = {
        let mut options = options;
        options.wasm.wasi.output = afresh_wasm::Output::Discard;
        options
    };
    options
}

#[cfg(feature = "wasm")]
const NO_COMPONENT: SaveError = SaveError::Guest(
    "a component can be saved in its warm state only, not after a call; a core module can",
);

impl Guest {
    /// Checks that a guest can be saved as `to`, before the work of warming one.
    ///
    /// # Errors
    /// [`SaveError::Reference`].
    pub fn check_target(to: &Reference) -> Result<(), SaveError> {
        target(to).map(drop).map_err(SaveError::from)
    }

    /// Saves the warm state as a snapshot: another process or machine opens it and continues from there, without the
    /// guest's own file. A directory is made if it is missing.
    ///
    /// # Errors
    /// [`SaveError`]; the name is unchanged then.
    pub fn save(&self, to: &Reference, options: &SaveOptions) -> Result<Saved, SaveError> {
        let frozen = match &self.inner().ready {
            #[cfg(feature = "wasm")]
            Backend::Module(warm) => {
                Frozen::Module(warm.freeze().map_err(|e| SaveError::Freeze(e.into()))?)
            }
            #[cfg(feature = "wasm")]
            Backend::Component(warm) => {
                if !options.record.is_empty() {
                    return Err(SaveError::Guest(
                        "no working set can be recorded for a component; leave the recorded calls out",
                    ));
                }
                Frozen::Module(warm.freeze().map_err(|e| SaveError::Freeze(e.into()))?)
            }
            #[cfg(feature = "vm")]
            Backend::Machine(machines) => Frozen::Machine(
                machines.pristine.freeze().map_err(|e| SaveError::Freeze(e.into()))?,
            ),
            #[cfg(feature = "linux")]
            Backend::Program(programs) => Frozen::Program(
                programs.pristine.freeze().map_err(|e| SaveError::Freeze(e.into()))?,
            ),
        };
        frozen.write(to, None, options, &self.inner().options)
    }
}

impl Lease<'_> {
    /// Saves the present state, including changes by the calls of this lease: a fork of the guest. In the directory
    /// of the snapshot that the guest came out of, only changes are stored.
    ///
    /// # Errors
    /// As [`Guest::save`].
    pub fn save(&mut self, to: &Reference, options: &SaveOptions) -> Result<Saved, SaveError> {
        let freeze = |source: Cause| SaveError::Freeze(source);
        let frozen = match &mut self.instance {
            #[cfg(feature = "wasm")]
            Instance::Module(lease) => {
                Frozen::Module(lease.freeze().map_err(|e| freeze(e.into()))?)
            }
            #[cfg(feature = "wasm")]
            Instance::Component(_) => return Err(NO_COMPONENT),
            #[cfg(feature = "vm")]
            Instance::Machine(machine) => {
                let snapshot = machine.snapshot().map_err(|e| freeze(e.into()))?;
                Frozen::Machine(snapshot.freeze().map_err(|e| freeze(e.into()))?)
            }
            #[cfg(feature = "linux")]
            Instance::Program(program) => {
                Frozen::Program(program.freeze().map_err(|e| freeze(e.into()))?)
            }
        };
        let parent = self.guest.origin().filter(|origin| {
            matches!(origin.reference.place(), Place::Directory(_))
                && origin.reference.place() == to.place()
                // The pages of a guest that has shrunk cannot form a delta.
                && frozen.pages() >= origin.snapshot.pages()
        });
        let parent = parent.map(|origin| {
            let changed = origin.memory.pages().differing_content(frozen.image());
            let changed = changed.map_err(|e| freeze(e.into()))?;
            Ok::<_, SaveError>(Parent { snapshot: origin.snapshot.clone(), changed })
        });
        let parent = parent.transpose()?;
        frozen.write(to, parent, options, &self.guest.inner().options)
    }
}
