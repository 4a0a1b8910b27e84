"""keys.py: what the owner types and reads, what is stored, and old files."""
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import pytest
from click.testing import CliRunner

import keys
from errors import InvalidKey, SettingsError
from store import database
from support import ROOT
from support.gateway import add_key, run_keys
from support.processes import clean_environment

KEY = re.compile(r"sk-sparks-[A-Za-z0-9_-]{32,}")
MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture(autouse=True)
def closed():
    yield
    if not database.database.deferred:
        database.database.close()


@pytest.fixture
def db(tmp_path):
    return tmp_path / "sparks.db"


@pytest.fixture
def run(db, monkeypatch):
    """run("add", "alice"): (exit code, stdout, stderr) of the command, within this process."""
    for name in [name for name in os.environ if name.startswith("SPARKS_")]:
        monkeypatch.delenv(name)

    def run(*arguments):
        environment = {"SPARKS_DB": f"sqlite:///{db}", "SPARKS_CONFIG": os.devnull}
        done = CliRunner().invoke(keys.cli, arguments, env=environment, prog_name="keys")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr
    return run


def said(run, *arguments):
    """stdout of a command that goes well and says nothing on stderr."""
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    return out


def added(run, *arguments):
    code, out, _ = run("add", *arguments)
    assert code == 0
    return out.splitlines()[-1]


def listed(run):
    return [(row["name"], row["revoked"] is None) for row in json.loads(said(run, "list", "--json"))]


def rows(db, sql):
    connection = sqlite3.connect(db)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


# ---- add

def test_add_prints_the_key_alone_on_stdout(run):
    code, out, err = run("add", "alice")
    assert code == 0 and KEY.fullmatch(out.removesuffix("\n"))
    assert err == ("A key for alice. It is shown this once: hand it over by a safe way. In a shell:\n"
                   "  export SPARKS_API_KEY=sk-sparks-...   (the key below)\n")


def test_add_as_json(run):
    code, out, _ = run("add", "alice", "--json")
    found = json.loads(out)
    assert code == 0 and KEY.fullmatch(found["key"])
    assert found == {"name": "alice", "prefix": found["key"][:16], "key": found["key"]}


def test_keys_are_long_random_and_different(run):
    found = {added(run, "alice", "--again") for _ in range(20)}
    assert len(found) == 20 and all(KEY.fullmatch(key) for key in found)
    assert len({key[10:16] for key in found}) == 20


def test_second_key_of_a_name_only_when_asked_for(run):
    added(run, "alice")
    message = "alice has a key already; --again makes another, `revoke alice` ends the old one"
    assert run("add", "alice") == (1, "", f"Error: {message}\n")
    added(run, "alice", "--again")
    added(run, "Alice")                             # another person
    assert listed(run) == [("Alice", True), ("alice", True), ("alice", True)]


def test_name_is_free_after_revoke(run):
    added(run, "alice")
    said(run, "revoke", "alice")
    added(run, "alice")
    assert listed(run) == [("alice", False), ("alice", True)]


@pytest.mark.parametrize("name", ["", " ", "\t", "a\nb", "a\x00b", "\x7f", "\x1b[31m", "x" * 65, "a\x9b31mb",
                                  "a\u2028b", "a\u202eb"], ids=ascii)
def test_bad_names(run, name):
    code, out, err = run("add", name)
    assert (code, out) == (1, "") and err.startswith("Error: a name has 1 to 64 ") and err.count("\n") == 1
    assert listed(run) == []


@pytest.mark.parametrize("name", ["x" * 64, "Jörg Müller", "bob@example.org", "日本", "'; DROP TABLE key; --"])
def test_good_names(run, name):
    key = added(run, "--", name)
    assert listed(run) == [(name, True)]
    assert keys.Keyring().check(f"Bearer {key}", None).name == name


def test_names_are_stripped(run):
    added(run, "  alice ")
    assert listed(run) == [("alice", True)]
    assert said(run, "revoke", " alice ").startswith("revoked sk-sparks-")


def test_name_that_is_no_text(db):
    """A shell can hand over bytes that are no UTF-8."""
    for verb in (["add"], ["revoke"], ["limit"], ["usage"], ["show"], ["log", "--key"], ["log", "--status"]):
        done = subprocess.run([sys.executable, "keys.py", *verb, b"a\xffb"], cwd=ROOT, capture_output=True, timeout=30,
                              env=clean_environment(db=f"sqlite:///{db}"))
        assert done.returncode == 1 and done.stdout == b"", (verb, done)
        assert done.stderr.startswith(b"Error: ") and done.stderr.count(b"\n") == 1, (verb, done)


# ---- list

def test_list(run):
    assert run("list") == (0, "", "no keys yet; `./run.sh keys add NAME` makes one\n")
    alice, bob = added(run, "alice"), added(run, "bob")
    said(run, "revoke", "bob")
    lines = said(run, "list").splitlines()
    assert re.fullmatch(rf"alice  {re.escape(alice[:16])}\.\.\.  {MOMENT}  active", lines[0])
    assert re.fullmatch(rf"bob    {re.escape(bob[:16])}\.\.\.  {MOMENT}  revoked {MOMENT}", lines[1])
    assert len(lines) == 2


def test_list_as_json(run):
    assert json.loads(said(run, "list", "--json")) == []
    key = added(run, "alice")
    found, = json.loads(said(run, "list", "--json"))
    assert re.fullmatch(MOMENT, found["created"])
    assert found == {"name": "alice", "prefix": key[:16], "created": found["created"], "revoked": None, "admin": False}


# ---- revoke

def test_revoke_by_name_ends_all_of_its_keys(run):
    first, second, other = added(run, "alice"), added(run, "alice", "--again"), added(run, "bob")
    assert said(run, "revoke", "alice") == f"revoked {first[:16]}... of alice\nrevoked {second[:16]}... of alice\n"
    assert listed(run) == [("alice", False), ("alice", False), ("bob", True)]
    assert keys.Keyring().check(None, other).name == "bob"


@pytest.mark.parametrize("given", [lambda key: key[:16], lambda key: key[:16] + "...", lambda key: key,
                                   lambda key: key[:13]], ids=["prefix", "as listed", "whole key", "short prefix"])
def test_revoke_by_prefix_or_key(run, given):
    first, second = added(run, "alice"), added(run, "alice", "--again")
    while first[:13] == second[:13]:
        second = added(run, "alice", "--again")
    assert said(run, "revoke", given(second)) == f"revoked {second[:16]}... of alice\n"
    assert keys.Keyring().check(None, first)
    with pytest.raises(InvalidKey):
        keys.Keyring().check(None, second)


def test_revoke_as_json(run):
    key = added(run, "alice")
    found, = json.loads(said(run, "revoke", "alice", "--json"))
    assert re.fullmatch(MOMENT, found["revoked"]) and found["prefix"] == key[:16]


def test_ambiguous_prefix(run, monkeypatch):
    made = iter(["same-aaaa" + "x" * 34, "same-abbb" + "x" * 34])
    monkeypatch.setattr(keys.secrets, "token_urlsafe", lambda size: next(made))
    added(run, "alice"), added(run, "bob")
    code, out, err = run("revoke", "sk-sparks-same-")
    assert (code, out, err) == (1, "", "Error: 2 active keys begin like that; give more of the prefix\n")
    assert run("revoke", "sk-sparks-same-a")[0] == 1
    assert listed(run) == [("alice", True), ("bob", True)]


@pytest.mark.parametrize("given", ["", "nobody", "sk-sparks-", "sk-", "sk-sparks-zzzzzz", "%", "sk-sparks-" + "x" * 43,
                                   "alic", "ALICE"])
def test_revoke_of_nothing(run, given):
    added(run, "alice")
    code, out, err = run("revoke", given)
    shown = given if len(given) <= 16 else given[:16] + "..."
    assert (code, out, err) == (1, "", f"Error: no active key has the name or prefix {shown!r}; `list` shows all\n")
    assert listed(run) == [("alice", True)]


def test_revoke_twice(run):
    key = added(run, "alice")
    said(run, "revoke", "alice")
    for given in ("alice", key, key[:16]):
        assert run("revoke", given)[0] == 1
    assert listed(run) == [("alice", False)]


# ---- two owners at once

@pytest.fixture
def meanwhile(db, monkeypatch):
    """meanwhile(sql): another process executes it between a command's reading and its writing."""
    def arrange(sql, *values):
        read = keys.named

        def named(given):
            found = read(given)
            with closing(sqlite3.connect(db, isolation_level=None)) as other:
                other.execute(sql, values)
            return found
        monkeypatch.setattr(keys, "named", named)
    return arrange


REVOKE = "UPDATE key SET revoked = '2026-11-29 12:00:00'"
STORED = {"requests_per_minute": ("--rpm", "60", 60), "tokens_per_minute": ("--tpm", "9000", 9000), "active": ("--active", "2", 2),
          "tokens_per_day": ("--tokens-per-day", "10000", 10_000), "tokens_per_month": ("--tokens-per-month", "20000", 20_000),
          "models": ("--models", "glm*,tiny", "glm*,tiny"), "expires": ("--expires", "2030-01-01", "2030-01-02 00:00:00"),
          "reasoning_field": ("--reasoning-field", "reasoning", "reasoning"),
          "keepalive_form": ("--keepalive-form", "chunk", "chunk"), "share": ("--share", "3", 3), "batch": ("--batch", None, 1),
          "trusts": ("--trusts", "X-User", "X-User"), "trusts_values": ("--trusts-values", None, 1)}                # column -> option, what is typed, what is stored


def options(*columns):
    return [part for column in columns for part in STORED[column][:2] if part]


def test_stored_is_every_limit():
    assert tuple(STORED) == keys.LIMITS


@pytest.mark.parametrize("given", [*([column] for column in STORED), [*STORED]], ids=",".join)
def test_limit_of_a_key_that_is_revoked_meanwhile(run, db, meanwhile, given):
    """It does not bring the key back to life, changes nothing, and says so."""
    key = added(run, "alice")
    meanwhile(REVOKE)
    assert run("limit", "alice", *options(*given)) == (
        1, "", f"Error: revoked meanwhile, and left as it is: {key[:16]}... of alice\n")
    assert rows(db, f"SELECT revoked, {', '.join(STORED)} FROM key") == [("2026-11-29 12:00:00", *[None] * len(STORED))]


def test_clear_of_a_key_that_is_revoked_meanwhile(run, db, meanwhile):
    added(run, "alice")
    said(run, "limit", "alice", *options(*STORED))
    meanwhile(REVOKE)
    code, out, err = run("limit", "alice", "--clear", "--json")
    assert (code, json.loads(out)) == (1, []) and err.startswith("Error: revoked meanwhile")
    assert rows(db, f"SELECT revoked, {', '.join(STORED)} FROM key") == [
        ("2026-11-29 12:00:00", *[stored for _, _, stored in STORED.values()])]


def test_one_of_two_keys_is_revoked_meanwhile(run, db, meanwhile):
    first, second = added(run, "alice"), added(run, "alice", "--again")
    meanwhile(REVOKE + " WHERE id = 1")
    error = f"Error: revoked meanwhile, and left as it is: {first[:16]}... of alice\n"
    assert run("limit", "alice", "--rpm", "60") == (1, f"alice  {second[:16]}...  requests per minute: 60\n", error)
    assert rows(db, "SELECT requests_per_minute, revoked IS NULL FROM key ORDER BY id") == [(None, 0), (60, 1)]


def test_revoke_of_a_key_that_is_revoked_meanwhile(run, db, meanwhile):
    first, second = added(run, "alice"), added(run, "alice", "--again")
    meanwhile(REVOKE + " WHERE id = 1")
    error = f"Error: revoked meanwhile, and left as it is: {first[:16]}... of alice\n"
    assert run("revoke", "alice") == (1, f"revoked {second[:16]}... of alice\n", error)
    assert rows(db, "SELECT revoked FROM key WHERE id = 1") == [("2026-11-29 12:00:00",)]


@pytest.mark.parametrize("column", STORED)
def test_limits_of_two_owners_both_survive(run, db, meanwhile, column):
    """Whatever one of them sets, all else is the other's; and what the command shows is what is in force."""
    added(run, "alice")
    stored = {name: value for name, (_, _, value) in STORED.items()}
    meanwhile(f"UPDATE key SET {column} = ?, admin = 1", stored[column])
    shown, = json.loads(said(run, "limit", "alice", "--json", *options(*STORED.keys() - {column})))
    assert rows(db, f"SELECT admin, {', '.join(STORED)} FROM key") == [(1, *stored.values())]
    assert None not in shown.values()


@pytest.mark.parametrize("column", STORED)
def test_revoke_keeps_what_another_owner_sets(run, db, meanwhile, column):
    added(run, "alice")
    _, _, value = STORED[column]
    meanwhile(f"UPDATE key SET {column} = ?", value)
    said(run, "revoke", "alice")
    assert rows(db, f"SELECT {column}, revoked IS NULL FROM key") == [(value, 0)]


# ---- shares, batch and people

def test_share_batch_and_trusts_are_shown(run):
    key = added(run, "webui")
    shown = said(run, "limit", "webui", "--share", "3", "--batch", "--trusts", "X-OpenWebUI-User-Id", "--trusts-values")
    assert shown == f"webui  {key[:16]}...  share: 3  batch  trusts: X-OpenWebUI-User-Id  trusts values\n" == said(run, "limit", "webui")
    found, = json.loads(said(run, "limit", "webui", "--no-batch", "--json"))
    assert [found[name] for name in ("share", "batch", "trusts", "trusts_values")] == [3, False, "X-OpenWebUI-User-Id", True]
    known = keys.Keyring().check(f"Bearer {key}", None)
    assert (known.limits.share, known.batch, known.trusts, known.trusts_values) == (3, False, "X-OpenWebUI-User-Id", True)
    said(run, "limit", "webui", "--trusts", "none")
    shown = said(run, "limit", "webui", "--trusts", "X-User", "--share", "none")     # what another header says is not kept by itself
    assert shown == f"webui  {key[:16]}...  trusts: X-User\n"
    assert said(run, "limit", "webui", "--clear") == f"webui  {key[:16]}...  no limits\n"


@pytest.mark.parametrize("header", ["X-OpenWebUI-User-Id", "x-user", "X-Forwarded-Email", "Remote-User", "From", "X-LibreChat-User", "a!b"])
def test_headers_that_may_name_people(run, header):
    added(run, "webui")
    assert f"trusts: {header}\n" in said(run, "limit", "webui", "--trusts", header)


@pytest.mark.parametrize("header, words", [
    *((header, "something else than who a person is") for header in (
        "Authorization", "PROXY-AUTHORIZATION", "x-api-key", "Cookie", "X-Auth-Token", "Host", "Content-Length", "Accept", "User-Agent",
        "X-Request-Id", "X-OpenWebUI-Chat-Id", "traceparent", "X-Forwarded-For", "X-Sparks-Edge", "anthropic-version", "Connection")),
    *((header, "no name of a header") for header in ("", " ", "a b", "X-User:", "X-User\n", "J\u00f6rg", "x" * 101)),
    ("X_User", "underscore")], ids=ascii)
def test_headers_that_may_not(run, header, words):
    added(run, "webui")
    code, out, err = run("limit", "webui", "--trusts", header)
    assert (code, out) == (2, "") and words in err and "X-OpenWebUI-User-Id" in err
    assert "no limits" in said(run, "limit", "webui")


@pytest.mark.parametrize("share", ["0", "101", "-1", "1.5", "half", "9" * 5000])
def test_shares_that_are_none(run, share):
    added(run, "webui")
    code, out, err = run("limit", "webui", "--share", share)
    assert (code, out) == (2, "") and "from 1 to 100" in err and len(err) < 500


# ---- wrong use

@pytest.mark.parametrize("arguments", [["nope"], ["add"], ["add", "a", "b"], ["revoke"], ["list", "--yaml"]])
def test_wrong_use_is_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and "Error: " in err


def test_help_names_the_commands(run):
    out = said(run, "--help")
    assert all(word in out for word in ("add", "list", "revoke", "./run.sh keys add alice"))


def test_wrong_setting_is_one_line(db):
    for name, value in [("SPARKS_DB", "postgres://nowhere"), ("SPARKS_MAX_ACTIVE", "many")]:
        done = subprocess.run([sys.executable, "keys.py", "list"], cwd=ROOT, capture_output=True, text=True, timeout=30,
                              env={**clean_environment(db=f"sqlite:///{db}"), name: value})
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"Error: {name}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [
    ("limit", "tester", "--expires", "9999-12-31"), ("limit", "tester", "--expires", "0001-01-01T00:00:00+14:00"),
    ("usage", "--days", "1000000"), ("log", "-n", "99999999999999999999")])
def test_beyond_all_bounds(stock, arguments):
    done = run_keys(*arguments, db=stock[0])
    assert done.returncode and "Traceback" not in done.stderr and "Error" in done.stderr


# ---- the file

def test_file_is_for_its_owner_alone(db):
    before = os.umask(0)
    try:
        assert run_keys("add", "alice", db=db).returncode == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(db.stat().st_mode) == 0o600


def test_open_file_has_no_readable_companions(db):
    before = os.umask(0)
    try:
        database.open_database(db)
        keys.add_key("alice")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in db.parent.iterdir()}
    assert modes == dict.fromkeys(["sparks.db", "sparks.db-wal", "sparks.db-shm"], 0o600)


def test_file_that_was_readable_is_closed(run, db):
    added(run, "alice")
    db.chmod(0o644)
    said(run, "list")
    assert stat.S_IMODE(db.stat().st_mode) == 0o600


def test_only_digest_and_prefix_are_stored(run, db):
    key = added(run, "alice")
    stored = b"".join(path.read_bytes() for path in db.parent.iterdir())
    assert key[:16].encode() in stored and keys.digest(key).encode() in stored
    assert key[:17].encode() not in stored and key[16:].encode() not in stored


def test_unusable_places(tmp_path):
    (tmp_path / "text").write_text("this is no database, but somebody's letter" * 100)
    (tmp_path / "short").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").chmod(0o666)
    for name in ("nowhere/sparks.db", ".", "text", "short", "text/sparks.db", "pipe"):
        done = run_keys("list", db=tmp_path / name)
        assert (done.returncode, done.stdout) == (1, ""), name
        assert done.stderr.startswith("Error: SPARKS_DB: ") and done.stderr.count("\n") == 1, done.stderr
        assert "cannot be used" in done.stderr
    assert (tmp_path / "text").read_text().startswith("this is no database")
    assert (tmp_path / "pipe").stat().st_mode & 0o777 == 0o666         # nor is /dev/null closed to others


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        done = run_keys("list", db=tmp_path / "sparks.db")
    finally:
        tmp_path.chmod(0o700)
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_gateway_does_not_start_on_an_unusable_file(tmp_path):
    environment = clean_environment(db=f"sqlite:///{tmp_path}/nowhere/sparks.db", bind="127.0.0.1:1")
    done = subprocess.run([sys.executable, "sparks.py"], cwd=ROOT, env=environment, capture_output=True, text=True,
                          timeout=30)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("sparks: SPARKS_DB: ")


def test_locked_file_is_one_line(run, db):
    """Longer than the five seconds for which a command waits."""
    added(run, "alice")
    database.database.close()
    writer = sqlite3.connect(db, isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        done = run_keys("add", "bob", db=db)
    finally:
        writer.close()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ") and "locked" in done.stderr and done.stderr.count("\n") == 1
    assert listed(run) == [("alice", True)]


def test_file_that_is_locked_for_a_moment(run, db):
    added(run, "alice")
    database.database.close()
    writer = sqlite3.connect(db, isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        process = subprocess.Popen([sys.executable, "keys.py", "add", "bob"], cwd=ROOT, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, env=clean_environment(db=f"sqlite:///{db}"))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
    finally:
        writer.close()
    assert KEY.fullmatch(process.communicate(timeout=60)[0].decode().strip())


def test_a_full_disk_is_one_line(tmp_path):
    add_key("a", tmp_path / "sparks.db")
    done = subprocess.run(["bash", "-c", 'ulimit -f 1; exec "$0" keys.py revoke a', sys.executable], cwd=ROOT, capture_output=True,
                          text=True, env={**clean_environment(db=f"sqlite:///{tmp_path}/sparks.db"), "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode and "Traceback" not in done.stderr


# ---- migrations

SCHEMA = "SELECT name, sql FROM sqlite_master ORDER BY name"


@pytest.fixture
def newest(tmp_path):
    """The tables of a new file."""
    database.open_database(tmp_path / "newest.db")
    database.database.close()
    return rows(tmp_path / "newest.db", SCHEMA)


def test_migrations_are_noted_once(db):
    for _ in range(3):
        database.open_database(db)
        database.database.close()
    assert rows(db, "SELECT name FROM migration") == [(step.__name__,) for step in database.MIGRATIONS]


@pytest.mark.parametrize("done", range(len(database.MIGRATIONS) + 1))
def test_old_files_are_brought_up_to_date(db, newest, done, monkeypatch):
    """A file without tables, and one that knows the first migrations only."""
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", database.MIGRATIONS[:done])
        database.open_database(db)
        insert = "INSERT INTO key (name, prefix, digest, created) VALUES ('alice', 'sk-sparks-x', ?, '2026-11-29 12:00:00')"
        key = "sk-sparks-x" if done else None
        if key:
            database.database.execute_sql(insert, (keys.digest(key),))
        database.database.close()
    database.open_database(db)
    assert rows(db, "SELECT name FROM migration") == [(step.__name__,) for step in database.MIGRATIONS]
    assert rows(db, SCHEMA) == newest
    assert not key or keys.Keyring().check(None, key).name == "alice"


def test_a_file_whose_index_the_owner_dropped(db, newest, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", database.MIGRATIONS[:4])
        database.open_database(db)
        database.database.execute_sql("DROP INDEX request_started")
        database.database.close()
    database.open_database(db)
    assert rows(db, SCHEMA) == newest


def test_empty_file_and_foreign_tables(db, newest):
    sqlite3.connect(db).execute("CREATE TABLE other (x)").connection.close()
    database.open_database(db)
    assert [row for row in rows(db, SCHEMA) if row[0] != "other"] == newest


def test_migration_that_fails_leaves_the_file_as_it_was(db, monkeypatch):
    database.open_database(db)
    database.database.close()

    def broken():
        yield "CREATE TABLE half (x)"
        yield "CREATE TABLE half (x)"

    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", [*database.MIGRATIONS, broken])
        with pytest.raises(SettingsError, match="half already exists"):
            database.open_database(db)
    assert rows(db, "SELECT name FROM sqlite_master WHERE name = 'half'") == []
    database.open_database(db)


# ---- with another Python

@pytest.fixture
def house(tmp_path):
    """A copy of the program without .venv."""
    home = tmp_path / "house"
    home.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, home)
    return home


def typed(house, *arguments):
    """`python3 keys.py …` with a Python that has no packages."""
    environment = {name: value for name, value in clean_environment().items() if not name.startswith("PYTHON")}
    return subprocess.run([sys._base_executable, "-S", "keys.py", *arguments], cwd=house, env=environment,
                          capture_output=True, text=True, timeout=30)


def test_python_without_the_packages(house):
    done = typed(house, "add", "alice")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "./run.sh" in done.stderr


def test_python_goes_on_in_venv(house):
    python = house / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 7\n')
    python.chmod(0o755)
    done = typed(house, "add", "two words", "--again", "")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"{house}/keys.py\nadd\ntwo words\n--again\n\n"


# ---- the ring

HEADERS = [                                         # Authorization, x-api-key -> the keys in them
    (None, None, set()),
    ("", "", set()),
    ("Bearer", None, set()),
    ("Bearer ", None, set()),
    ("Bearer a", None, {"a"}),
    ("bearer a", None, {"a"}),
    ("BEARER   a  ", None, {"a"}),
    ("Basic a", None, set()),
    ("a", None, set()),
    (None, "a", {"a"}),
    (None, " a ", {"a"}),
    ("Bearer a", "a", {"a"}),
    ("Bearer a", "b", {"a", "b"}),
    ("Bearer a,Bearer a", None, {"a"}),
    ("Bearer a, Bearer b", None, {"a", "b"}),
    (None, "a,a", {"a"}),
    (None, "a, b", {"a", "b"}),
    ("Bearer é", "\udcff", {"é", "\udcff"}),
]


@pytest.mark.parametrize("authorization, x_api_key, found", HEADERS)
def test_credentials(authorization, x_api_key, found):
    assert keys.credentials(authorization, x_api_key) == found


def test_ring_sees_what_another_process_does(db):
    database.open_database(db)
    ring, key = keys.Keyring(), run_keys("add", "alice", db=db).stdout.strip()
    assert ring.check(None, key).name == "alice"
    assert run_keys("revoke", "alice", db=db).returncode == 0
    with pytest.raises(InvalidKey):
        ring.check(None, key)


def test_keys_that_could_not_be_read_are_not_fresh(db, monkeypatch):
    database.open_database(db)
    ring, key = keys.Keyring(), run_keys("add", "alice", db=db).stdout.strip()
    with monkeypatch.context() as patch:
        patch.setattr(keys, "active_keys", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                ring.check(None, key)
    assert ring.check(None, key).name == "alice"


def test_ring_sees_another_file_in_its_place(tmp_path):
    """SQLite counts versions from the same number for each connection, and Python may put a new one where the last one was."""
    ring = keys.Keyring()
    for at in range(6):
        path = tmp_path / f"{at}.db"
        database.open_database(path)
        key = keys.add_key("alice")
        database.database.close()
        database.open_database(path)
        ring.looked = -keys.FRESH
        try:
            assert ring.check(None, key).name == "alice"
        finally:
            database.database.close()


def test_ring_reads_the_keys_only_when_they_changed(db, monkeypatch):
    database.open_database(db)
    key = run_keys("add", "alice", db=db).stdout.strip()
    ring, asked = keys.Keyring(), []
    ring.check(None, key)
    real = database.database.execute_sql
    monkeypatch.setattr(keys.database, "execute_sql", lambda sql, *rest: asked.append(sql) or real(sql, *rest))
    for _ in range(3):
        ring.check(None, key)
    assert not asked                                # the version is asked past peewee
