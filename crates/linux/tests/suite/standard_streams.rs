//! Standard streams of a run: a program sees pipes.

use crate::common;

use std::io::{Read, Write, pipe};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use afresh_linux::{End, HostStreams, Program};

const INPUT: &[u8] = b"abcdefghijklmnopqrstuvwxyz";

/// A pipe with the input, whose writer has left.
fn input() -> std::io::PipeReader {
    let (reader, mut writer) = pipe().unwrap();
    writer.write_all(INPUT).unwrap();
    reader
}

#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn standard_streams_are_pipes_as_on_linux() {
    let Some(path) = common::compiled("standard_streams.c", &["-static"]) else { return };
    let (mut reader, writer) = pipe().unwrap();
    let (mut messages, errors) = pipe().unwrap();
    let mut native = Command::new(&path);
    let mut child =
        native.stdin(input()).stdout(Stdio::from(writer)).stderr(errors).spawn().unwrap();
    drop(native);
    let (mut expected, mut expected_messages) = (String::new(), String::new());
    reader.read_to_string(&mut expected).unwrap();
    messages.read_to_string(&mut expected_messages).unwrap();
    assert!(child.wait().unwrap().success());

    let (output, messages) = (Output::default(), Output::default());
    let streams = HostStreams::default()
        .input(input().into())
        .output(output.clone())
        .messages(messages.clone());
    let Some(run) = common::here(Program::new(&path).run_to_end(streams)) else { return };
    let text = |output: &Output| String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text(&messages), expected_messages);
    assert_eq!((text(&output), run.end), (expected, End::Exit(0)));
}

#[test]
fn a_read_into_several_buffers_takes_as_much_of_a_request_as_there_is() {
    let Some(python) = common::python() else { return };
    let script = "import os
while True:
    parts = [bytearray(2), bytearray(50)]
    count = os.readv(0, parts)
    if not count:
        break
    text = b''.join(parts)[:count]
    print(count, text.decode(), end='', flush=True)";
    let Some(warm) = common::here(python.arg("-c").arg(script).request(b"warm\n").warm()) else {
        return;
    };
    let mut instance = warm.instance();
    assert_eq!(instance.call(b"first line\n").unwrap(), b"11 first line\n");
    assert_eq!(instance.call(b"second\n").unwrap(), b"7 second\n");
}
