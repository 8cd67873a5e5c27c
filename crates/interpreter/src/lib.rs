//! Internal crate of `afresh`. Guests that evaluate code: their requests, their calls to the host,
//! and their answers.
//!
//! Two kinds of interface are known. QuickJS ([`CallConvention::Array`]) exports `evaluate`, which
//! takes an array in CBOR, and imports `afresh_interpreter`; CPython ([`CallConvention::Frame`])
//! exports `turn`, which takes a header with parts behind it, and hands frames to `host.call`. Both
//! answer alike: `[0, value, text]`, or `[1, name, message, trace, number]` for an exception. The
//! guests' own halves describe them: `guests/quickjs` and `driver.py`.
//!
//! A Linux program that evaluates code ([`Language::program`]) has the interface of CPython,
//! through its standard input and output, each request and frame after its length.
//!
//! Promises: decoded values of a guest take memory in proportion to their bytes, and damaged ones
//! are errors. The state of a call is host state of its lease, so none of it outlives the call.

mod answer;
mod answer_limit;
mod characters;
mod commands;
mod displayed;
mod evaluate;
mod frame;
mod handler;
mod language;
mod listener;
pub mod objects;
#[cfg(linux_guests)]
mod program_grants;
mod request;
pub mod tag;
mod value;

pub use answer::{Answer, AnswerError, RenderedValue, Thrown};
pub use answer_limit::AnswerTooLong;
pub use characters::CharacterJoiner;
pub use commands::{CommandCost, CommandOutput, Commands};
pub use displayed::{DisplayedResult, DisplayedResults};
#[cfg(linux_guests)]
pub use evaluate::proceed;
pub use evaluate::{Evaluation, evaluate};
pub use handler::Interpreter;
pub use language::{Language, LibraryError, UnknownLanguage, is_module};
pub use listener::{HostCallbacks, Stream, imports, listener, state};
#[cfg(linux_guests)]
pub use program_grants::ProgramGrants;
pub use request::{CELL, COMMAND, CallConvention, RUN, Request, SETUP, Tools};
