//! A warm guest: opened once, called many times, each time from the same state.

use std::path::PathBuf;
use std::sync::Arc;

use afresh::files::{Budget, Time, Tree};
use afresh::{Call as WarmUpCall, Guest, Options, Reference, SaveOptions};
use afresh_interpreter::{Interpreter, Language, Request};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::call::{Call, Limits, Stop, guest_options};
use crate::error::Failure;
use crate::outcome::{Parties, Setup, evaluate};
use crate::program::ProgramOptions;
use crate::reply::Reply;

/// A guest to be opened.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Opening {
    /// A reference, or the name of a language.
    reference: String,
    /// The Wasm module of the language.
    module: Option<PathBuf>,
    /// A directory with CPython's library, which snapshots of it need.
    library: Option<PathBuf>,
    setup: Option<String>,
    /// Exports to call, and how many bytes of the request each is given.
    calls: Vec<(String, usize)>,
    cache: Option<PathBuf>,
    /// The folder of guests that were compiled in advance.
    precompiled: Option<PathBuf>,
    /// Whether the cache is filled for such a folder.
    portable: bool,
    limits: Limits,
    linux: ProgramOptions,
}

/// A Linux program to be opened that evaluates code.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct ProgramOpening {
    reference: String,
    setups: Vec<String>,
    cache: Option<PathBuf>,
    limits: Limits,
    linux: ProgramOptions,
}

/// A guest in its warm state.
pub(crate) struct Warm {
    pub(crate) guest: Guest,
    pub(crate) interpreter: Option<Interpreter>,
    setup: Setup,
}

/// The files that the Python guest's library makes.
fn library(language: &Language, module: &std::path::Path) -> Result<Tree, Failure> {
    let tree = Tree::new(Budget::default());
    let (mut tree, _) =
        language.over_library(tree, module, None).map_err(|error| Failure::open(&error))?;
    tree.make_directories("/tmp", Time::now()).map_err(|error| Failure::open(&error))?;
    Ok(tree)
}

/// Splits the bytes of a request among its calls.
fn warm_ups(calls: Vec<(String, usize)>, mut bytes: &[u8]) -> Result<Vec<WarmUpCall>, Failure> {
    let mut all = Vec::new();
    for (function, length) in calls {
        let (input, rest) = bytes
            .split_at_checked(length)
            .ok_or_else(|| Failure::argument("the input of a call is missing"))?;
        bytes = rest;
        all.push(match input.is_empty() {
            true => WarmUpCall::text(function, Vec::<String>::new()),
            false => WarmUpCall::bytes(function, input.to_vec()),
        });
    }
    Ok(all)
}

impl Warm {
    /// Opens a language, a module or a snapshot, and warms it up.
    pub(crate) fn open(opening: Opening, bytes: &[u8], call: &Call) -> Result<Self, Failure> {
        let mut wasm = guest_options(&call.stop);
        let language = match &opening.module {
            Some(_) => Some(
                Language::named(&opening.reference)
                    .map_err(|error| Failure::argument(error.to_string()))?,
            ),
            None => None,
        };
        if let Some(language) = language {
            let own = language.env.iter();
            wasm.wasi.env =
                own.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        }
        // Before the files below snapshots, which are among these options.
        let mut options = Options::new().wasm(wasm);
        if let (Some(language), Some(module)) = (language, &opening.module) {
            options = options.files(library(language, module)?);
            if let Some(stack) = language.stack {
                options = options.stack(stack);
            }
            let warm_up = language
                .warm_up()
                .into_iter()
                .chain(opening.setup.as_deref().map(|setup| language.setup(setup)));
            options = warm_up.fold(options, Options::warm);
        } else {
            if let Some(artifacts) = &opening.library
                && let Ok(python) = Language::named("python")
            {
                options = options.files_below(library(python, &artifacts.join("python.wasm"))?);
            }
            options = options.linux(opening.linux.shape(None)?);
            options = warm_ups(opening.calls, bytes)?.into_iter().fold(options, Options::warm);
            if let Some(setup) = &opening.setup {
                let language =
                    Language::named("js").map_err(|error| Failure::argument(error.to_string()))?;
                options = options.warm(language.setup(setup));
            }
        }
        if let Some(cache) = opening.cache {
            options = options.cache(cache);
        }
        if let Some(precompiled) = opening.precompiled {
            options = options.precompiled(precompiled);
        }
        if opening.portable {
            options = options.portable();
        }
        let opened = match &opening.module {
            Some(path) => {
                let read = |source| afresh::OpenError::Read { path: path.clone(), source };
                std::fs::read(path)
                    .map_err(read)
                    .and_then(|wasm| Guest::from_bytes(&opening.reference, &wasm, &options))
            }
            None => afresh::open(&opening.reference, &options),
        };
        let opened = Self::opened(opened, opening.limits, call)?;
        if opening.linux.has_useless_net(&opened.guest) {
            return Err(Failure::argument(format!(
                "{} is no Linux program, and only those connect to servers: leave `net` out",
                opening.reference
            )));
        }
        Ok(opened)
    }

    /// Opens a Linux program that evaluates Python.
    pub(crate) fn open_program(opening: ProgramOpening, call: &Call) -> Result<Self, Failure> {
        let language =
            Language::named("python").map_err(|error| Failure::argument(error.to_string()))?;
        let mut options =
            Options::new().kind(afresh::Kind::Program).linux(opening.linux.shape(Some(language))?);
        if let Some(cache) = opening.cache {
            options = options.cache(cache);
        }
        let setups = opening.setups.iter().map(|setup| language.program_setup(setup));
        options = setups.fold(options, Options::warm);
        let opened = afresh::open(&opening.reference, &options);
        if let Err(error) = &opened
            && is_late(error)
        {
            return Err(Failure::timeout(format!(
                "{} and its setup were not ready in time: simplify the setup, or raise `setupTimeoutMs`",
                opening.reference
            )));
        }
        Self::opened(opened, opening.limits, call)
    }

    fn opened(
        opened: Result<Guest, afresh::OpenError>,
        limits: Limits,
        call: &Call,
    ) -> Result<Self, Failure> {
        let guest = opened.map_err(|error| match call.stop.is_set() {
            true => Failure::stopped("the warm-up was stopped by its host"),
            false => Failure::open(&error),
        })?;
        let interpreter = Interpreter::of(&guest);
        Ok(Self { guest, interpreter, setup: Setup::new(limits, &[]) })
    }

    /// Its kind, and whether it evaluates code.
    pub(crate) fn describe(&self) -> Value {
        let kind = match self.guest.kind() {
            afresh::Kind::Module => "module",
            afresh::Kind::Component => "component",
            afresh::Kind::Machine => "machine",
            afresh::Kind::Program => "program",
            _ => "guest",
        };
        json!({ "kind": kind, "isInterpreter": self.interpreter.is_some() })
    }

    fn parties<'a>(call: &'a Arc<Call>, streams: bool) -> Parties<'a> {
        Parties { call, session: Stop::default(), streams, commands: None }
    }

    /// Evaluates code from the warm state, and drops its changes.
    pub(crate) fn run(
        &self,
        call: &Arc<Call>,
        code: &str,
        name: &str,
        streams: bool,
    ) -> Result<Reply, Failure> {
        let Interpreter { handler, form } = self.interpreter.as_ref().ok_or_else(no_interpreter)?;
        let request = self.setup.request(afresh_interpreter::RUN, code, name, None, *form);
        let mut lease = self.guest.lease().map_err(|error| Failure::guest(error.to_string()))?;
        let parties = Self::parties(call, streams);
        Ok(evaluate(&mut lease, handler, &self.setup, parties, request, false).into_reply())
    }

    /// Calls a handler of bytes from the warm state, and drops its changes.
    pub(crate) fn call(
        &self,
        call: &Arc<Call>,
        export: &str,
        input: &[u8],
    ) -> Result<Reply, Failure> {
        self.check_call()?;
        let handler = self.guest.function(export).map_err(|error| Failure::call(&error))?;
        let mut lease = self.guest.lease().map_err(|error| Failure::guest(error.to_string()))?;
        let parties = Self::parties(call, false);
        let request = Request::plain(input);
        evaluate(&mut lease, &handler, &self.setup, parties, request, false).into_bytes()
    }

    /// Saves the warm state; returns its id.
    pub(crate) fn save(&self, to: &str) -> Result<String, Failure> {
        let to = reference(to)?;
        let form = self.interpreter.as_ref().map(|interpreter| interpreter.form);
        let linux = self.guest.kind() == afresh::Kind::Program;
        let least = form.map(|form| {
            WarmUpCall::bytes(form.function(), self.setup.minimal_request(form, linux))
        });
        // Pages that every evaluation touches are read first when the snapshot is opened, and not
        // one by one.
        let recorded = least.map(|call| self.guest.save(&to, &SaveOptions::new().record(call)));
        let saved = match recorded {
            // A guest that answers nothing now is saved as well.
            None | Some(Err(afresh::SaveError::Record { .. })) => {
                self.guest.save(&to, &SaveOptions::new())
            }
            Some(saved) => saved,
        };
        Ok(saved.map_err(|error| Failure::save(&error))?.id.to_string())
    }

    /// Refuses calls of bytes where the standard input is that of an interpreter.
    pub(crate) fn check_call(&self) -> Result<(), Failure> {
        match self.guest.kind() == afresh::Kind::Program && self.interpreter.is_some() {
            true => Err(Failure::sandbox(
                "this guest is a Linux program that evaluates code, and has no exports: use `runCode` or `apply`",
            )),
            false => Ok(()),
        }
    }
}

/// Whether a Linux program did not become ready within its time.
fn is_late(error: &afresh::OpenError) -> bool {
    let afresh::OpenError::Guest { source, .. } = error else { return false };
    matches!(source.downcast_ref(), Some(afresh::linux::WarmError::Late { .. }))
}

/// Parses a reference.
pub(crate) fn reference(text: &str) -> Result<Reference, Failure> {
    text.parse().map_err(|error: afresh::ReferenceError| Failure::save(&error))
}

/// Code was given to a guest that evaluates none.
pub(crate) fn no_interpreter() -> Failure {
    Failure::sandbox(
        "this guest evaluates no code: call one of its exports with `call(export, input)`",
    )
}
