//! A database as a guest: PostgreSQL with its processes, their shared memory and their files, warm
//! and pristine for every call.

use crate::common;

use std::path::PathBuf;
use std::time::Duration;

use afresh_linux::{Frozen, Program, Warm};
use afresh_pager::{Options, SnapshotOptions};
use afresh_store::Store;

const LIMIT: Duration = Duration::from_secs(200);

/// Each line is a statement, and its result the answer.
const SERVE: &str = r#"
cd /tmp
initdb -D /tmp/data -A trust --no-sync --no-instructions > /tmp/initdb.log || { cat /tmp/initdb.log; exit 1; }
pg_ctl -D /tmp/data -o "-k /tmp -c shared_buffers=4MB" -l /tmp/log -w start > /dev/null || { cat /tmp/log; exit 1; }
psql -h /tmp -d postgres -qc 'create table list (a int primary key); insert into list select generate_series(1, 2000)'
while read -r line; do psql -h /tmp -d postgres -Atqc "$line"; done
"#;

/// The folder of the newest server's programs on Debian.
fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let folders = versions.map(|entry| entry.path().join("bin"));
    folders.filter(|folder| folder.join("initdb").is_file()).max()
}

fn is_pristine(warm: &Warm) {
    let mut instance = warm.instance();
    let insert = b"insert into list values (5000); select count(*), max(a) from list\n";
    for _ in 0..2 {
        assert_eq!(instance.call_pristine(insert).unwrap(), b"2001|5000\n");
        instance.verify().unwrap();
    }
    // Without a reset the row is there, and the database refuses another with its key.
    assert_eq!(instance.call_pristine(b"select count(*) from list\n").unwrap(), b"2000\n");
    assert_eq!(instance.call(insert).unwrap(), b"2001|5000\n");
    assert_eq!(instance.call(insert).unwrap(), b"");
    assert_eq!(instance.call(b"select count(*) from list\n").unwrap(), b"2001\n");
}

#[test]
fn a_database_starts_every_call_from_the_same_rows() {
    let Some(folder) = programs() else {
        println!("SKIPPED: no PostgreSQL server below /usr/lib/postgresql");
        return;
    };
    let path = format!("{}:/usr/bin:/bin", folder.display());
    let program = Program::new("/bin/bash").arg("-c").arg(SERVE).env("PATH", path);
    let program = program.memory_limit(16 << 30).time_limit(LIMIT).start_limit(LIMIT);
    let Some(warm) = common::here(program.warm()) else { return };
    is_pristine(&warm);

    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    warm.freeze().unwrap().save(&store, "warm", &SnapshotOptions::default()).unwrap();
    let frozen = Frozen::load(store.load("warm").unwrap(), &Options::default()).unwrap();
    is_pristine(&Warm::thaw(&frozen, &program).unwrap());
}
