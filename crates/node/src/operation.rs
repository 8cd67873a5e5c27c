//! Operations that JavaScript begins: their requests in JSON, and their results.

use std::sync::Arc;
use std::time::Duration;

use afresh_interpreter::COMMAND;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::call::{Call, Limits};
use crate::error::Failure;
use crate::exec::{self, Execution};
use crate::objects::Objects;
use crate::outcome::Setup;
use crate::reply::Reply;
use crate::session::{Evaluation, Session, StateRef};
use crate::warm::{Opening, ProgramOpening, Warm};

/// An operation. Guests and sessions are given by their handles.
#[derive(Debug, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum Operation {
    Open(Opening),
    OpenProgram(ProgramOpening),
    SaveWarm { warm: u32, to: String },
    RunWarm { warm: u32, code: String, name: String, streams: bool },
    CallWarm { warm: u32, export: String },
    Session { warm: u32, limits: Limits, tools: Vec<String> },
    Run { session: u32, what: u8, code: String, name: String, streams: bool },
    CallExport { session: u32, export: String },
    Offer { session: u32, tools: Vec<String> },
    Failed { session: u32 },
    Checkpoint { session: u32, name: String },
    Rollback { session: u32, to: StateRef },
    Fork { session: u32, count: usize },
    Diff { session: u32, one: StateRef, two: StateRef },
    DropState { session: u32, which: StateRef },
    Tree { session: u32 },
    Save { session: u32, to: String },
    Delta { session: u32, since: StateRef },
    ApplyDelta { session: u32 },
    ReadFile { session: u32, path: String },
    WriteFile { session: u32, path: String },
    ListFiles { session: u32, path: String },
    MakeDirectory { session: u32, path: String },
    StatFile { session: u32, path: String },
    RemoveFile { session: u32, path: String },
    Command { session: u32, wanted: String, starts: bool },
    TakeOutput { session: u32, pid: u32, serial: u64 },
    AdoptCommand { session: u32, pid: u32 },
    BeginWait { session: u32 },
    Drive { session: u32, wait: f64, moved: bool },
    Dial { session: u32, port: u16 },
    Exchange { session: u32, connection: u32, room: usize },
    HangUp { session: u32, connection: u32 },
    Exec(Execution),
}

/// Runs an operation to its end.
pub(crate) fn run(
    objects: &Objects,
    call: &Arc<Call>,
    request: &str,
    bytes: &[u8],
) -> Result<Reply, Failure> {
    let operation: Operation = serde_json::from_str(request)
        .map_err(|error| Failure::argument(format!("an option is invalid: {error}")))?;
    let session = |handle| objects.session(handle);
    let warm = |handle| objects.warm(handle);
    let with_bytes = |bytes| Reply { json: Value::Null, bytes };
    Ok(match operation {
        Operation::Open(opening) => add_warm(objects, Warm::open(opening, bytes, call)?),
        Operation::OpenProgram(opening) => add_warm(objects, Warm::open_program(opening, call)?),
        Operation::SaveWarm { warm: handle, to } => json!(warm(handle)?.save(&to)?).into(),
        Operation::RunWarm { warm: handle, code, name, streams } => {
            warm(handle)?.run(call, &code, &name, streams)?
        }
        Operation::CallWarm { warm: handle, export } => warm(handle)?.call(call, &export, bytes)?,
        Operation::Session { warm: handle, limits, tools } => {
            let warm = warm(handle)?;
            let live = warm.guest.session().map_err(|error| Failure::session(&error))?;
            let session = Session::new(live, warm, Setup::new(limits, &tools));
            json!(objects.add_session(session)).into()
        }
        Operation::Run { session: handle, what, code, name, streams } => {
            let arguments = (!bytes.is_empty()).then_some(bytes);
            let given = Evaluation { what, code: &code, name: &name, arguments, streams };
            session(handle)?.run(call, &given)?
        }
        Operation::CallExport { session: handle, export } => {
            session(handle)?.call(call, &export, bytes)?
        }
        Operation::Offer { session: handle, tools } => {
            session(handle)?.offer(&tools);
            Value::Null.into()
        }
        Operation::Failed { session: handle } => json!(session(handle)?.failed()?).into(),
        Operation::Checkpoint { session: handle, name } => {
            json!(session(handle)?.checkpoint(&name)?).into()
        }
        Operation::Rollback { session: handle, to } => {
            json!(session(handle)?.rollback(&to)?).into()
        }
        Operation::Fork { session: handle, count } => {
            let forks = session(handle)?.fork(count)?;
            let handles: Vec<_> = forks.into_iter().map(|fork| objects.add_session(fork)).collect();
            json!(handles).into()
        }
        Operation::Diff { session: handle, one, two } => session(handle)?.diff(&one, &two)?.into(),
        Operation::DropState { session: handle, which } => {
            session(handle)?.drop_state(&which)?;
            Value::Null.into()
        }
        Operation::Tree { session: handle } => session(handle)?.tree()?.into(),
        Operation::Save { session: handle, to } => json!(session(handle)?.save(&to)?).into(),
        Operation::Delta { session: handle, since } => with_bytes(session(handle)?.delta(&since)?),
        Operation::ApplyDelta { session: handle } => json!(session(handle)?.apply(bytes)?).into(),
        Operation::ReadFile { session: handle, path } => {
            with_bytes(session(handle)?.read_file(&path)?)
        }
        Operation::WriteFile { session: handle, path } => {
            session(handle)?.write_file(&path, bytes)?;
            Value::Null.into()
        }
        Operation::ListFiles { session: handle, path } => {
            json!(session(handle)?.list_files(&path)?).into()
        }
        Operation::MakeDirectory { session: handle, path } => {
            session(handle)?.make_directory(&path)?;
            Value::Null.into()
        }
        Operation::StatFile { session: handle, path } => session(handle)?.stat_file(&path)?.into(),
        Operation::RemoveFile { session: handle, path } => {
            session(handle)?.remove_file(&path)?;
            Value::Null.into()
        }
        Operation::Command { session: handle, wanted, starts } => {
            command(&*session(handle)?, call, &wanted, starts)?
        }
        Operation::TakeOutput { session: handle, pid, serial } => {
            take_output(&*session(handle)?, pid, serial)
        }
        Operation::AdoptCommand { session: handle, pid } => {
            json!(session(handle)?.commands.adopt(pid, false)).into()
        }
        Operation::BeginWait { session: handle } => {
            let session = session(handle)?;
            session.check_linux()?;
            session.begin();
            Value::Null.into()
        }
        Operation::Drive { session: handle, wait, moved } => {
            let wait = Duration::try_from_secs_f64(wait / 1e3).unwrap_or_default();
            json!(session(handle)?.drive(call, wait, moved)?).into()
        }
        Operation::Dial { session: handle, port } => json!(session(handle)?.dial(port)?).into(),
        Operation::Exchange { session: handle, connection, room } => {
            session(handle)?.exchange(connection, bytes, room)?
        }
        Operation::HangUp { session: handle, connection } => {
            session(handle)?.hang_up(connection)?;
            Value::Null.into()
        }
        Operation::Exec(execution) => exec::run(execution, call, bytes)?,
    })
}

fn add_warm(objects: &Objects, warm: Warm) -> Reply {
    let described = warm.describe();
    json!({ "handle": objects.add_warm(warm), "about": described }).into()
}

/// An operation on the commands of a Linux sandbox; with `starts` the outcome has the command's
/// serial number.
fn command(
    session: &Session,
    call: &Arc<Call>,
    wanted: &str,
    starts: bool,
) -> Result<Reply, Failure> {
    session.check_linux()?;
    let (what, name, arguments) = (COMMAND, "<command>", None);
    let given = Evaluation { what, code: wanted, name, arguments, streams: false };
    if !starts {
        return session.run(call, &given);
    }
    session.commands.begin();
    let outcome = session.run(call, &given);
    let serial = session.commands.started_serial().unwrap_or_default();
    let mut reply = outcome?;
    if let Some(json) = reply.json.as_object_mut() {
        json.insert("serial".to_owned(), json!(serial));
    }
    Ok(reply)
}

/// The output of a command since the last time; null if it does not exist any more.
fn take_output(session: &Session, pid: u32, serial: u64) -> Reply {
    let Some((output, moves)) = session.commands.take(pid, serial) else {
        return Value::Null.into();
    };
    let json = json!({
        "lengths": [output.stdout.len(), output.stderr.len()],
        "truncated": output.truncated,
        "exitCode": output.ended,
        "moves": moves,
    });
    Reply { json, bytes: [output.stdout, output.stderr].concat() }
}
