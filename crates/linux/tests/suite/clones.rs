//! Many instances of one warm program: each equals the program, regardless of the others.

use crate::common;

use afresh_linux::Program;

#[test]
fn writes_of_one_instance_are_in_no_later_one() {
    let Some(path) = common::compiled("canary.c", &[]) else { return };
    let Some(warm) = common::here(Program::new(path).warm()) else { return };
    let clean = warm.instance().call(b"look\n").unwrap();
    for round in 0..8 {
        let mut instance = warm.instance();
        assert_eq!(instance.call(b"look\n").unwrap(), clean, "round {round}");
        instance.verify().unwrap();
        assert_eq!(instance.call(b"dirty\n").unwrap(), b"done\n");
        assert_ne!(instance.call(b"look\n").unwrap(), clean);
        instance.verify().unwrap();
        assert_eq!(instance.call(b"poke\n").unwrap(), b"done\n");
        assert_eq!(instance.call_pristine(b"look\n").unwrap(), clean, "round {round}");
    }
}

#[test]
fn a_program_that_reads_its_input_through_another_descriptor_is_warm_and_brought_back() {
    let program = Program::new("/bin/cat").arg("/dev/stdin");
    let Some(warm) = common::here(program.warm()) else { return };
    for _ in 0..4 {
        let mut instance = warm.instance();
        for request in [b"one\n".as_slice(), b"two and more\n"] {
            assert_eq!(instance.call_pristine(request).unwrap(), request);
            assert_eq!(instance.call(b"and on\n").unwrap(), b"and on\n");
        }
        instance.verify().unwrap();
    }
}
