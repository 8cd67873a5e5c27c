//! Servers and databases.

use super::case::ProgramCase;

pub(super) const SERVERS: &[ProgramCase] = &[
    ProgramCase {
        name: "redis",
        about: "commands, pipelines, scripts, publish and subscribe, a background save, a restart",
        needs: &["redis-server", "redis-cli", "redis-benchmark"],
        packages: &["redis-server", "redis-tools"],
        script: r##"
start() { redis-server --port 22479 --save '' --dir "$HOME" --loglevel warning > log 2>&1 & for _ in $(seq 100); do redis-cli -p 22479 ping > pong 2>&1 && break; sleep 0.1; done; cat pong; }
start; c="redis-cli -p 22479"; $c set a 1; $c incr a; seq 5000 | sed 's/.*/SET k& v&/' | $c --pipe | tail -n 1; $c dbsize; $c eval 'return redis.call("GET", KEYS[1])' 1 k77
(sleep 0.5; $c publish ch hello > /dev/null) & timeout 5 $c subscribe ch | head -n 6 | tail -n 1 || true
$c bgsave; for _ in $(seq 100); do $c info persistence | grep -q rdb_bgsave_in_progress:0 && break; sleep 0.1; done; $c info persistence | grep -o last_bgsave_status:ok
redis-benchmark -p 22479 -q -n 2000 -c 10 -t set,get > bench; grep -c 'requests per second' bench; $c shutdown nosave || true; wait
start; $c dbsize; $c get k5000; $c shutdown nosave || true; wait
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "memcached",
        about: "sets, gets and increments by the text protocol",
        needs: &["memcached"],
        packages: &["memcached"],
        unprivileged: true,
        script: r##"
memcached -l 127.0.0.1 -p 22411 -t 2 & for _ in $(seq 100); do (exec 3<> /dev/tcp/127.0.0.1/22411) 2> /dev/null && break; sleep 0.1; done
exec 3<> /dev/tcp/127.0.0.1/22411; printf 'set a 0 0 5\r\nhello\r\nget a\r\nset n 0 0 1\r\n1\r\nincr n 41\r\ndelete a\r\nget a\r\nquit\r\n' >&3; tr -d '\r' <&3; kill %1; wait || true
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "nginx",
        about: "two workers: files, ranges, compression, a proxy, a reload",
        needs: &["nginx", "curl"],
        packages: &["nginx-light", "curl"],
        unprivileged: true,
        script: r##"
mkdir -p site logs tmp; seq 50000 > site/big.txt; echo small > site/index.html
cat > nginx.conf <<END
worker_processes 2; pid $HOME/pid; error_log $HOME/logs/error; events { worker_connections 64; }
http { access_log $HOME/logs/access; gzip on; gzip_types text/plain; types { text/plain txt; text/html html; }
client_body_temp_path $HOME/tmp/a; proxy_temp_path $HOME/tmp/b; fastcgi_temp_path $HOME/tmp/c; uwsgi_temp_path $HOME/tmp/d; scgi_temp_path $HOME/tmp/e;
server { listen 127.0.0.1:22482; root $HOME/site; location /p/ { proxy_pass http://127.0.0.1:22482/; } } }
END
nginx -c "$HOME/nginx.conf" -e "$HOME/logs/error" -g 'daemon off;' & for _ in $(seq 100); do curl -sf http://127.0.0.1:22482/ && break; sleep 0.1; done
u=http://127.0.0.1:22482; curl -s $u/big.txt | sha256sum; curl -s -r 100-119 $u/big.txt | sha256sum; curl -s --compressed $u/big.txt | sha256sum; curl -s $u/p/index.html; curl -s -o /dev/null -w '%{http_code}\n' $u/none
for n in $(seq 20); do curl -s "$u/?$n"; done | sort | uniq -c | sed 's/^ *//'; nginx -c "$HOME/nginx.conf" -e "$HOME/logs/error" -s reload; sleep 0.5; curl -s $u/; wc -l < logs/access; kill %1; wait || true
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "PostgreSQL",
        about: "a cluster: start, SQL, a transaction, a dump",
        needs: &["/usr/lib/postgresql/15/bin/postgres"],
        packages: &["postgresql-15"],
        unprivileged: true,
        prepare: r##"
rm -rf data; mkdir data; if [ "$(id -u)" = 0 ]; then chown 65534:65534 data; drop='setpriv --reuid 65534 --regid 65534 --clear-groups'; else drop=; fi
HOME=/tmp $drop /usr/lib/postgresql/15/bin/initdb -D data -U me --auth=trust --locale=C --encoding=UTF8 --no-sync > log
chmod -R a+rX data
"##,
        script: r##"
export PATH=/usr/lib/postgresql/15/bin:$PATH PGHOST=$HOME PGUSER=me PGDATABASE=postgres; cp -r "$FILES/data" data; chmod 700 data
printf "listen_addresses = ''\nunix_socket_directories = '$HOME'\nfsync = off\nshared_buffers = 16MB\n" >> data/postgresql.conf
pg_ctl -D data -l log -w -t 100 start > /dev/null; psql -qAtc 'create table t (a int primary key, b text); insert into t select g, md5(g::text) from generate_series(1, 2000) g;' -c 'select count(*), sum(a), max(b) from t'
psql -qAt <<'END'
begin; delete from t where a > 1000; rollback; select count(*) from t; select b from t where a = 77; create index on t (b); explain (costs off) select * from t where b = 'x';
select jsonb_agg(a) from t where a < 4; select 1 / 0;
END
pg_dump -t t | grep -v '^--' | grep -v restrict | sha256sum; pg_ctl -D data -m fast -w stop
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "pgbench",
        about: "40 transactions of two clients at a cluster of PostgreSQL",
        needs: &["/usr/lib/postgresql/15/bin/pgbench"],
        packages: &["postgresql-15"],
        unprivileged: true,
        prepare: r##"
rm -rf data; mkdir data; if [ "$(id -u)" = 0 ]; then chown 65534:65534 data; drop='setpriv --reuid 65534 --regid 65534 --clear-groups'; else drop=; fi
HOME=/tmp $drop /usr/lib/postgresql/15/bin/initdb -D data -U me --auth=trust --locale=C --encoding=UTF8 --no-sync > log
chmod -R a+rX data
"##,
        script: r##"
export PATH=/usr/lib/postgresql/15/bin:$PATH PGHOST=$HOME PGUSER=me PGDATABASE=postgres; cp -r "$FILES/data" data; chmod 700 data
printf "listen_addresses = ''\nunix_socket_directories = '$HOME'\nfsync = off\nshared_buffers = 16MB\n" >> data/postgresql.conf
pg_ctl -D data -l log -w -t 100 start > /dev/null; pgbench -q -i -s 1 > /dev/null 2>&1
pgbench -t 20 -c 2 2> /dev/null | grep 'actually processed'; psql -qAtc 'select count(*) from pgbench_history'; pg_ctl -D data -m fast -w stop
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "initdb",
        about: "makes the cluster of PostgreSQL",
        needs: &["/usr/lib/postgresql/15/bin/initdb"],
        packages: &["postgresql-15"],
        unprivileged: true,
        script: r##"
/usr/lib/postgresql/15/bin/initdb -D data -U me --auth=trust --locale=C --encoding=UTF8 --no-sync > log; ls data | wc -l; cat data/PG_VERSION
"##,
        ..ProgramCase::EMPTY
    },
    ProgramCase {
        name: "MariaDB",
        about: "a new data directory, a server, SQL with InnoDB",
        needs: &["mariadbd", "mariadb", "mariadb-install-db"],
        packages: &["mariadb-server", "mariadb-client"],
        unprivileged: true,
        script: r##"
size="--innodb-buffer-pool-size=16M" # it reserves 8 TiB of addresses
mariadb-install-db --no-defaults --datadir="$HOME/data" $size --auth-root-authentication-method=normal --skip-test-db > log 2>&1
mariadbd --no-defaults --datadir="$HOME/data" --socket="$HOME/s" --skip-networking $size --innodb-use-native-aio=0 > server 2>&1 &
for _ in $(seq 300); do mariadb-admin --no-defaults -u root --socket="$HOME/s" ping > /dev/null 2>&1 && break; sleep 0.1; done
mariadb --no-defaults -u root --socket="$HOME/s" -N <<'END'
create database d; use d; create table t (a int primary key, b varchar(40)) engine = innodb; insert into t select seq, md5(seq) from seq_1_to_2000; select count(*), sum(a), max(b) from t;
start transaction; delete from t where a > 1000; rollback; select count(*) from t; select b from t where a = 77;
END
mariadb-admin --no-defaults -u root --socket="$HOME/s" shutdown; wait; echo "status $?"
"##,
        ..ProgramCase::EMPTY
    },
];
