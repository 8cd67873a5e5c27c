//! Languages and their runtimes.

use super::case::ProgramCase;

pub(super) const LANGUAGES: &[ProgramCase] = &[
    ProgramCase {
        name: "python",
        about: "json, sqlite, threads, subprocesses, asyncio, multiprocessing, zip",
        needs: &["/usr/bin/python3"],
        packages: &["python3"],
        short: true,
        script: r##"
/usr/bin/python3 - <<'END'
import asyncio, concurrent.futures as futures, hashlib, json, multiprocessing, pathlib, sqlite3, subprocess, tempfile, threading, zipfile
print(json.dumps({"a": [1, 2.5, None]}), hashlib.sha256(b"x" * 100000).hexdigest()[:16])
db = sqlite3.connect("d.sqlite"); db.execute("create table t (x)"); db.executemany("insert into t values (?)", [(n,) for n in range(1000)]); db.commit()
print(db.execute("select sum(x) from t").fetchone())
print(subprocess.run(["sort"], input="b\na\n", text=True, capture_output=True).stdout.split(), subprocess.call(["false"]))
with futures.ThreadPoolExecutor(4) as pool: print(sum(pool.map(lambda n: n * n, range(100))))
async def main():
    async def echo(reader, writer): writer.write(await reader.readline()); await writer.drain(); writer.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0); port = server.sockets[0].getsockname()[1]
    async def ask(n):
        reader, writer = await asyncio.open_connection("127.0.0.1", port); writer.write(b"%d\n" % n); line = await reader.readline(); writer.close(); return int(line)
    print(sum(await asyncio.gather(*map(ask, range(30)))))
    process = await asyncio.create_subprocess_exec("echo", "child", stdout=-1); print((await process.communicate())[0])
asyncio.run(main())
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2, -3]))
with zipfile.ZipFile("z.zip", "w") as z: z.writestr("a", "text" * 100)
print(zipfile.ZipFile("z.zip").read("a")[:8], sorted(p.name for p in pathlib.Path(".").iterdir()))
END
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "psutil",
        about: "processes, memory, processors, disks and networks of the system",
        needs: &["/usr/bin/python3"],
        packages: &["python3", "python3-psutil"],
        script: r##"
/usr/bin/python3 - <<'END'
import os, psutil, subprocess
me = psutil.Process(); child = subprocess.Popen(["sleep", "100"])
print(me.name(), me.status(), me.pid == os.getpid(), [c.name() for c in me.children()], me.num_threads(), me.cwd() == os.getcwd())
print(me.memory_info().rss > 1 << 20, me.cpu_times().user >= 0, psutil.virtual_memory().total > 1 << 20, psutil.cpu_count() >= 1, psutil.boot_time() > 0)
open_file = open("f", "w"); print('f' in [os.path.basename(f.path) for f in me.open_files()], psutil.pid_exists(os.getppid()), "lo" in psutil.net_if_addrs())
print(psutil.disk_usage("/").total > 0, len(psutil.cpu_percent(percpu=True)) >= 1, me.exe().startswith("/usr/bin/python3"), len(psutil.pids()) >= 2)
child.terminate(); print(child.wait(), psutil.swap_memory().total >= 0, len(psutil.getloadavg()), len(me.environ()) > 2, type(me.memory_maps()).__name__)
print(type(psutil.net_connections()).__name__, type(psutil.net_io_counters()).__name__, type(psutil.disk_partitions()).__name__, psutil.users())
END
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "gRPC",
        about: "a server with threads, and a client that calls and streams",
        needs: &["/usr/bin/python3"],
        packages: &["python3", "python3-grpcio"],
        script: r##"
/usr/bin/python3 - <<'END'
import grpc
from concurrent import futures
def double(request, context): return request * 2
def count(request, context): yield from (b"%d" % n for n in range(int(request)))
handlers = {"Double": grpc.unary_unary_rpc_method_handler(double), "Count": grpc.unary_stream_rpc_method_handler(count)}
server = grpc.server(futures.ThreadPoolExecutor(4)); server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s.S", handlers),))
port = server.add_insecure_port("127.0.0.1:0"); server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    call = channel.unary_unary("/s.S/Double"); print([call(b"%d" % n) for n in range(20)][-1], len(list(channel.unary_stream("/s.S/Count")(b"100"))))
    try: channel.unary_unary("/s.S/None")(b"")
    except grpc.RpcError as error: print(error.code())
server.stop(None).wait()
END
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "node",
        about: "workers, fetch, child_process, fs.watch, streams, crypto",
        needs: &["node"],
        packages: &["nodejs"],
        script: r##"
cat > main.mjs <<'END'
import { Worker, isMainThread, parentPort } from 'node:worker_threads'
import { execFileSync, spawn, fork } from 'node:child_process'
import fs from 'node:fs'; import http from 'node:http'; import zlib from 'node:zlib'; import crypto from 'node:crypto'
import { once } from 'node:events'; import { pipeline } from 'node:stream/promises'
const workers = [1, 2, 3].map(n => new Worker(`require('worker_threads').parentPort.postMessage([...Array(1e5).keys()].reduce((a, b) => a + b) * ${n})`, { eval: true }))
console.log(await Promise.all(workers.map(async w => (await once(w, 'message'))[0])))
const server = http.createServer((q, r) => { let n = 0; q.on('data', d => n += d.length).on('end', () => r.end(`${q.method} ${q.url} ${n}`)) }).listen(0, '127.0.0.1')
await once(server, 'listening'); const base = `http://127.0.0.1:${server.address().port}`
console.log(await (await fetch(base + '/a')).text(), await (await fetch(base + '/b', { method: 'POST', body: 'x'.repeat(1e5) })).text())
console.log((await Promise.all([...Array(30).keys()].map(async n => (await fetch(`${base}/${n}`)).status))).every(s => s === 200)); server.close()
console.log(execFileSync('echo', ['child']).toString().trim())
const cat = spawn('sort'); cat.stdin.end('b\na\n'); let out = ''; for await (const piece of cat.stdout) out += piece; console.log(JSON.stringify(out))
fs.writeFileSync('kid.cjs', 'process.on("message", m => { process.send(m * 2); process.disconnect() })'); const kid = fork('./kid.cjs'); kid.send(21); console.log((await once(kid, 'message'))[0])
fs.mkdirSync('watched'); const watcher = fs.watch('watched'); setTimeout(() => fs.writeFileSync('watched/new', ''), 50); console.log(await once(watcher, 'change')); watcher.close()
await pipeline(fs.createReadStream(process.execPath, { end: 1e6 }), zlib.createGzip(), fs.createWriteStream('z.gz')); console.log(zlib.gunzipSync(fs.readFileSync('z.gz')).length)
console.log(crypto.createHash('sha256').update('x').digest('hex').slice(0, 16), crypto.pbkdf2Sync('a', 'b', 1000, 16, 'sha256').toString('hex'))
process.exit(0)
END
node main.mjs
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "java, javac",
        about: "compiles and runs a program with threads, an HTTP server and client, and a process",
        needs: &["java", "javac"],
        packages: &["default-jdk-headless"],
        script: r##"
cat > Main.java <<'END'
import java.net.*; import java.net.http.*; import java.nio.file.*; import java.util.*; import java.util.concurrent.*; import java.util.stream.*;
public class Main { public static void main(String[] a) throws Exception {
  System.out.println(IntStream.range(0, 100000).parallel().mapToLong(x -> x).sum());
  var pool = Executors.newFixedThreadPool(4); var all = new ArrayList<Future<Integer>>(); for (int i = 0; i < 100; i++) { int n = i; all.add(pool.submit(() -> n * n)); }
  int sum = 0; for (var f : all) sum += f.get(); System.out.println(sum); pool.shutdown();
  var server = com.sun.net.httpserver.HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
  server.createContext("/", x -> { var b = x.getRequestURI().getPath().getBytes(); x.sendResponseHeaders(200, b.length); x.getResponseBody().write(b); x.close(); }); server.start();
  var client = HttpClient.newHttpClient(); String last = "";
  for (int i = 0; i < 20; i++) last = client.send(HttpRequest.newBuilder(URI.create("http://127.0.0.1:" + server.getAddress().getPort() + "/" + i)).build(), HttpResponse.BodyHandlers.ofString()).body();
  System.out.println(last); server.stop(0);
  var p = new ProcessBuilder("echo", "child").start(); System.out.print(new String(p.getInputStream().readAllBytes())); System.out.println(p.waitFor());
  Files.writeString(Path.of("f"), "text\n".repeat(1000)); System.out.println(Files.lines(Path.of("f")).count()); var map = new TreeMap<String, byte[]>();
  for (int i = 0; i < 300; i++) map.put("k" + i, new byte[100_000]); System.gc(); System.out.println(map.size()); System.exit(3); } }
END
javac Main.java; java -cp . Main || echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "ruby",
        about: "threads, sockets, processes, json, files",
        needs: &["ruby"],
        packages: &["ruby"],
        script: r##"
cat > main.rb <<'END'
require 'json'; require 'socket'; require 'open3'; require 'digest'; require 'tempfile'
puts JSON.generate(a: [1, nil]), Digest::SHA256.hexdigest('x')[0, 16]
puts (1..4).map { |n| Thread.new { (1..1000).sum * n } }.map(&:value).inspect
server = TCPServer.new('127.0.0.1', 0); Thread.new { loop { c = server.accept; c.puts c.gets.upcase; c.close } }
puts 10.times.map { |n| s = TCPSocket.new('127.0.0.1', server.addr[1]); s.puts "hello #{n}"; s.read }.last
out, status = Open3.capture2('sort', stdin_data: "b\na\n"); p out, status.exitstatus
r, w = IO.pipe; pid = fork { r.close; w.puts 'from child'; exit!(7) }; w.close; puts r.read; Process.wait(pid); p $?.exitstatus
trap('USR1') { puts 'signal' }; Process.kill('USR1', $$); sleep 0.05; Tempfile.create { |f| f.write('x'); f.flush; p File.size(f.path) }
END
ruby main.rb
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "php",
        about: "its own HTTP server, json, regular expressions, processes",
        needs: &["php", "curl"],
        packages: &["php-cli", "curl"],
        script: r##"
echo '<?php echo json_encode(["path" => $_SERVER["REQUEST_URI"], "sum" => array_sum(range(1, 100))]), "\n";' > index.php
php -S 127.0.0.1:22481 index.php > log 2>&1 & for _ in $(seq 100); do curl -sf http://127.0.0.1:22481/up && break; sleep 0.1; done
for n in $(seq 10); do curl -s "http://127.0.0.1:22481/$n"; done | tail -n 1; kill %1; wait
php -r 'echo preg_replace("/(\w+) (\w+)/", "$2 $1", "one two"), "\n", shell_exec("echo child"), hash("sha256", "x"), "\n"; file_put_contents("f", str_repeat("a", 1000)); echo filesize("f"), PHP_EOL; exit(4);' || echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "perl",
        about: "regular expressions, fork, pipes, sockets, signals",
        needs: &["perl"],
        packages: &["perl"],
        short: true,
        script: r##"
perl - <<'END'
use strict; use warnings; use IO::Socket::INET; use List::Util 'sum'; $| = 1;
my %count; $count{lc $_}++ for "The cat and the dog and the bird" =~ /\w+/g; print join(",", map { "$_=$count{$_}" } sort keys %count), "\n";
pipe(my $r, my $w); my $pid = fork; if (!$pid) { close $r; print $w "child\n"; close $w; exit 5 } close $w; print <$r>; waitpid($pid, 0); print $? >> 8, "\n";
my $server = IO::Socket::INET->new(Listen => 5, LocalAddr => "127.0.0.1", Proto => "tcp") or die; my $port = $server->sockport;
if (!($pid = fork)) { my $c = $server->accept; print $c scalar reverse(<$c> =~ s/\n//r), "\n"; exit } 
my $s = IO::Socket::INET->new("127.0.0.1:$port") or die; print $s "hello\n"; print <$s>; waitpid($pid, 0);
$SIG{ALRM} = sub { print "alarm\n" }; alarm 1; select(undef, undef, undef, 5); print sum(map { $_ ** 2 } 1 .. 100), "\n"; print `echo backtick`;
open(my $f, ">", "f") or die; print $f "line $_\n" for 1 .. 1000; close $f; print -s "f", "\n";
END
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "sqlite",
        about: "10,000 rows in a journal and in WAL mode, with two connections",
        needs: &["sqlite3"],
        packages: &["sqlite3"],
        script: r##"
sqlite3 d.db "create table t (id integer primary key, x text, y int); with recursive n(i) as (select 1 union all select i + 1 from n where i < 10000) insert into t select i, 'row ' || i, i % 97 from n; create index i on t (y);"
sqlite3 d.db "select count(*), sum(id), max(x) from t where y = 7; pragma integrity_check; pragma journal_mode = wal; pragma mmap_size = 10000000;"
sqlite3 d.db "begin; update t set x = 'new' where id % 3 = 0; commit; select count(*) from t where x = 'new';" ; (sqlite3 d.db ".timeout 5000" "delete from t where id > 9000;" & sqlite3 d.db ".timeout 5000" "insert into t values (-1, 'b', 1);"; wait)
sqlite3 d.db "pragma mmap_size = 10000000; select count(*), sum(length(x)) from t; vacuum; pragma integrity_check;" ; sqlite3 d.db .dump | sha256sum
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "LMDB",
        about: "loads 5,000 keys, dumps, copies; reads by a map while it writes",
        needs: &["mdb_load", "mdb_dump", "gcc"],
        packages: &["lmdb-utils", "liblmdb-dev", "gcc", "libc6-dev"],
        prepare: r##"
cat > l.c <<'END'
#include <lmdb.h>
#include <stdio.h>
#include <string.h>
int main(void) { MDB_env *e; MDB_txn *t; MDB_dbi d; MDB_val k, v; int stale = 0, i; mdb_env_create(&e); mdb_env_set_mapsize(e, 1 << 24);
if (mdb_env_open(e, "env", 0, 0644)) return 2;
for (i = 0; i < 500; i++) { mdb_txn_begin(e, 0, 0, &t); mdb_dbi_open(t, 0, 0, &d); k.mv_data = "key"; k.mv_size = 3; v.mv_data = &i; v.mv_size = 4; mdb_put(t, d, &k, &v, 0);
if (mdb_txn_commit(t)) return 3; mdb_txn_begin(e, 0, MDB_RDONLY, &t); if (mdb_get(t, d, &k, &v) || memcmp(v.mv_data, &i, 4)) stale++; mdb_txn_abort(t); }
printf("%d stale\n", stale); return 0; }
END
gcc -O1 -o l l.c -llmdb
"##,
        script: r##"
mkdir db copy env; { printf 'VERSION=3\nformat=print\ntype=btree\nmapsize=16777216\nHEADER=END\n'; seq -f ' key%05g' 5000 | sed 'p;s/key/value/'; echo DATA=END; } > in
mdb_load -f in db; mdb_dump -p db | sha256sum; mdb_stat db | grep Entries; mdb_copy db copy; mdb_dump -p copy | tail -n 2; "$FILES/l"
"##,
        ..ProgramCase::EMPTY
    },
];
