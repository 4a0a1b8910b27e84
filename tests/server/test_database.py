"""The database's file: a backup in its place, the log of another file, damage, and what is gone."""
import os
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import gevent
import peewee
import pytest

import keys
from errors import InvalidKey, SettingsError
from store import database, file, ledger
from store.database import check_whole, is_ours, let_go, open_database
from support.chat import HELLO, PATH
from support.engine import Json, completion
from support.rows import read, row_of, rows


@pytest.fixture(autouse=True)
def closed():
    yield
    let_go()


@pytest.fixture
def db(tmp_path):
    return tmp_path / "sparks.db"


def in_a_process_that_dies(work):
    """Nothing is closed: as with kill -9, the log stays beside the file."""
    let_go()
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def row(n):
    """A row of a request that went well."""
    return ledger.Row(f"request-{n}", 1, "GLM", "http://127.0.0.1:8000", f"POST {PATH}", 1_798_804_800.0 + n, 3, 120, 2000, 200,
                      None, True, False, False, 1000, 600, 50, 20)


def write(*numbers):
    ledger.commit([row(n) for n in numbers])


def idents(db):
    return [int(found["id"].removeprefix("request-")) for found in rows(db)]


def by_sqlite(db, to):
    with closing(sqlite3.connect(db)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def by_vacuum(db, to):
    with closing(sqlite3.connect(db)) as source:
        source.execute("VACUUM INTO ?", (str(to),))


def with_its_time(backup, db):
    """And then both files get a mode, or an owner: the log is the one that was changed last."""
    shutil.copyfile(backup, db)
    shutil.copystat(backup, db)
    for part in (db, db.with_name(db.name + "-wal")):
        time.sleep(0.01)
        os.chmod(part, 0o600)


WAYS = {"moved": os.replace, "written over it": shutil.copyfile}
LATER = {**WAYS, "with its time": with_its_time}


@pytest.mark.parametrize("put", LATER.values(), ids=LATER)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "checkpoints later"])
@pytest.mark.parametrize("make", [by_sqlite, by_vacuum, shutil.copyfile], ids=lambda make: make.__name__)
def test_a_backup_beside_the_log_of_what_was_there(db, caplog, make, late, put):
    """The old file's log is set aside, whatever else is the same."""
    backup = db.with_name("backup.db")
    open_database(db)
    write(*range(50))
    if make is shutil.copyfile:
        let_go()                                    # only then is a plain copy a backup
        make(db, backup)
        open_database(db)
    else:
        make(db, backup)

    def go_on():
        open_database(db)
        for n in range(50, 250):
            write(n)
            if late and n % 60 == 0:
                database.checkpoint()

    in_a_process_that_dies(go_on)
    assert db.with_name("sparks.db-wal").stat().st_size > 20_000
    put(backup, db)
    open_database(db, check=check_whole)
    assert idents(db) == list(range(50)) and read(db, "PRAGMA integrity_check") == [{"integrity_check": "ok"}]
    aside, = db.parent.glob("sparks.db.left-*-wal")
    assert aside.stat().st_size > 20_000 and "another file's" in caplog.text
    write(1000)
    let_go()
    assert idents(db)[-1] == 1000


@pytest.mark.parametrize("late", [False, True])
def test_its_own_log_is_used(db, late):
    """After kill -9; and wherever file and log are copied to together, over another pair too."""
    def work():
        open_database(db)
        for n in range(100):
            write(n)
            if late and n % 40 == 0:
                database.checkpoint()

    in_a_process_that_dies(work)
    pair = [db, db.with_name("sparks.db-wal")]
    for name, copy in (("a", shutil.copy2), ("b", shutil.copyfile)):
        (db.parent / name).mkdir()
        for part in pair:
            copy(part, db.parent / name / part.name)
        open_database(db.parent / name / db.name, check=check_whole)
        assert idents(db.parent / name / db.name) == list(range(100))
        let_go()
        for part in pair:
            shutil.copyfile(part, db.parent / name / f"{part.name}.kept")
    in_a_process_that_dies(lambda: (open_database(db), write(*range(100, 200))))
    for part in pair:
        shutil.copyfile(db.parent / "b" / f"{part.name}.kept", part)
    open_database(db, check=check_whole)
    assert idents(db) == list(range(100)) and not list(db.parent.glob("*.left-*"))


def test_a_log_whose_file_is_gone(db):
    in_a_process_that_dies(lambda: (open_database(db), write(*range(100))))
    db.unlink()
    open_database(db)
    assert idents(db) == [] and len(list(db.parent.glob("sparks.db.left-*-wal"))) == 1


def damage(db):
    """Some pages in the middle are none."""
    let_go()
    spoil(db)


def lacking(file):
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("DROP TABLE day")


def spoil(file):
    with open(file, "r+b") as file:
        file.seek(os.fstat(file.fileno()).st_size // 2048 * 1024)
        file.write(b"\xff" * 8192)


def test_a_damaged_file_is_refused_and_left_alone(db):
    open_database(db)
    write(*range(1000))
    damage(db)
    content = db.read_bytes()
    with pytest.raises(SettingsError, match="it is damaged .*put a backup in its place; or move it away"):
        open_database(db, check=check_whole)
    assert db.read_bytes() == content


def test_what_to_do_is_said_once(db):
    open_database(db)
    let_go()
    with open(db, "r+b") as file:
        file.seek(28)
        file.write(b"\0\0\xff\xff")                # so many pages
    with pytest.raises(SettingsError, match="malformed") as caught:
        open_database(db, check=check_whole)
    assert str(caught.value).count("put a backup in its place") == 1


def test_two_that_open_a_file_at_once(db, monkeypatch):
    """Only one of them looks whose the log is: the other would set aside the first one's new log, with what is in it."""
    monkeypatch.setattr(file, "MOMENT", 0.05)
    open_database(db)
    with open(db, "r+b") as other:
        with file.in_hand(other.fileno()), pytest.raises(SettingsError, match="about to open it; try again"):
            open_database(db)
        open_database(db)


def test_an_emptied_file_is_refused(db):
    in_a_process_that_dies(lambda: (open_database(db), write(*range(100))))
    os.truncate(db, 0)
    with pytest.raises(SettingsError, match="it was emptied; put a backup"):
        open_database(db, check=check_whole)
    assert db.with_name("sparks.db-wal").stat().st_size > 10_000


# ---- while it is open

@pytest.fixture
def book(db, monkeypatch):
    monkeypatch.setattr(ledger, "PATIENCE", 0)
    open_database(db, patient=False)
    return ledger.Ledger(SimpleNamespace(keep_days=90, db=db))


@pytest.mark.parametrize("put", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", [by_sqlite, by_vacuum])
def test_a_backup_in_place_of_an_open_file(db, book, make, late, put):
    """What is written from then on is in the new file, and the old log in neither."""
    backup, old = db.with_name("backup.db"), db.with_name("old.db")
    write(*range(50))
    make(db, backup)
    write(*range(50, 100))
    if late:
        database.checkpoint()
        write(100)
    if put is os.replace:
        os.rename(db, old)
    put(backup, db)
    assert not is_ours()
    book.write(row(500))
    assert len(book.waiting) == 1
    book.keep_up_once()
    book.keep_up_once()
    assert not book.waiting and idents(db) == [*range(50), 500]
    if old.exists():
        assert idents(old) == list(range(100 + late))
    let_go()
    assert read(db, "PRAGMA integrity_check") == [{"integrity_check": "ok"}]


@pytest.mark.parametrize("harm, words", [
    (lambda db: db.unlink(), "No such file"), (lambda db: os.truncate(db, 0), "put a backup in its place"),
    (lambda db: db.write_bytes(b"no database" * 1000), "no SQLite database"),
    (lambda db: os.truncate(db, 3072), "put a backup in its place"),
    (lambda db: os.replace(db.with_name("broken.db"), db), "put a backup in its place"),
    (lambda db: (by_sqlite(db, db.with_name("other.db")), lacking(db.with_name("other.db")),
                 os.replace(db.with_name("other.db"), db)), "no such table: day"),
], ids=["gone", "emptied", "another file", "cut off", "damaged", "without a table"])
def test_what_cannot_be_used_is_not(db, book, caplog, harm, words):
    """Keys count as they were, rows wait, one line a minute says so; and a good file heals it all."""
    broken = db.with_name("broken.db")
    key, ring = keys.add_key("alice"), keys.Keyring()
    write(*range(1000))
    by_sqlite(db, db.with_name("backup.db"))
    shutil.copyfile(db.with_name("backup.db"), broken)
    spoil(broken)
    assert ring.check(None, key).name == "alice"
    harm(db)
    for n in range(3):
        book.write(row(2000 + n))
        book.keep_up_once()
        ring.looked = -keys.FRESH
        assert ring.check(None, key).name == "alice"
        with pytest.raises(InvalidKey):
            ring.check(None, "sk-sparks-other")
    assert len(book.waiting) == 3 and caplog.text.count("keys count as they were") == 1 and words in caplog.text
    assert "Traceback" not in caplog.text
    os.replace(db.with_name("backup.db"), db)
    for _ in range(2):
        book.keep_up_once()
    assert idents(db) == [*range(1000), 2000, 2001, 2002] and ring.check(None, key).name == "alice"


def test_what_other_programs_do_to_an_open_file_is_no_swap(db, book):
    """A checkpoint, an index, VACUUM, a restore by SQLite itself."""
    write(*range(200))
    by_sqlite(db, db.with_name("backup.db"))
    for sql in ("PRAGMA wal_checkpoint(TRUNCATE)", "CREATE INDEX own ON request (id)", "VACUUM"):
        with closing(sqlite3.connect(db, isolation_level=None)) as other:
            other.execute(sql).fetchall()
            other.execute("PRAGMA wal_checkpoint").fetchall()
        write(len(idents(db)))
        assert is_ours() and idents(db)[-1] == len(idents(db)) - 1
    with closing(sqlite3.connect(db)) as target, closing(sqlite3.connect(db.with_name("backup.db"))) as source:
        source.backup(target)
    write(9)
    assert is_ours() and idents(db) == [*range(200), 9]


@pytest.mark.parametrize("lock", ["BEGIN", "BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_backup_that_is_locked_when_it_is_put_in_place(db, book, lock):
    """By whoever looks into it with sqlite3. Nothing waits inside SQLite for that, and in the end it is used."""
    backup = db.with_name("backup.db")
    write(*range(50))
    by_sqlite(db, backup)
    with closing(sqlite3.connect(backup, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = delete")
        other.execute(lock)
        other.execute("SELECT * FROM request").fetchone()
        os.replace(backup, db)
        since = time.monotonic()
        for n in range(3):
            book.write(row(500 + n))
            book.keep_up_once()
        assert time.monotonic() - since < 2.5 and len(book.waiting) == 3
    for _ in range(2):
        book.keep_up_once()
    assert not book.waiting and idents(db) == [*range(50), 500, 501, 502]


def test_backups_are_told_apart_though_the_file_was_locked(db, book, monkeypatch):
    """All copies that SQLite makes have the same stamp, until the gateway could give them its own."""
    def locked(execute):
        raise peewee.OperationalError("database is locked")

    backup = db.with_name("backup.db")
    for n in range(2):
        write(n)
        by_sqlite(db, backup)
        shutil.copyfile(backup, db)
        assert not is_ours()
        with monkeypatch.context() as patch:
            patch.setattr(database, "begin_log", locked)
            book.keep_up_once()
        book.keep_up_once()
        backup.unlink()
    assert idents(db) == [0, 1]


def test_a_reader_holds_up_no_checkpoint(db, book):
    """While it waits for the reader to end, nobody can write."""
    write(*range(50))
    with closing(sqlite3.connect(db, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM request").fetchone()
        write(50)
        since = time.monotonic()
        book.checkpoint()
        assert time.monotonic() - since < 2.5


def test_a_swap_in_a_checkpoint(db, book, monkeypatch):
    """They don't overlap: the checkpoint's connection would meet the log of the new file."""
    backup, begun, go_on = db.with_name("backup.db"), threading.Event(), threading.Event()
    write(*range(50))
    by_sqlite(db, backup)
    write(*range(50, 100))
    begin_log = database.begin_log

    def slowed(execute):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait(5)
        begin_log(execute)

    monkeypatch.setattr(database, "begin_log", slowed)
    checkpoint = gevent.spawn(book.checkpoint)
    while not begun.is_set():
        gevent.sleep(0.01)
    os.replace(backup, db)
    for n in range(500, 504):
        book.write(row(n))
        gevent.sleep(0.01)
    assert len(book.waiting) == 4
    go_on.set()
    checkpoint.join()
    for _ in range(2):
        book.keep_up_once()
    write(504)
    assert not book.waiting and idents(db) == [*range(50), *range(500, 505)]


def test_a_link_that_leads_elsewhere(db, book, tmp_path):
    """As another file in its place, which a gateway goes on with."""
    link = tmp_path / "link.db"
    link.symlink_to(db)
    write(1)
    by_sqlite(db, tmp_path / "other.db")
    book.settings.db = link
    open_database(link, patient=False, alone=True)
    write(2)
    (tmp_path / "new").symlink_to("other.db")
    os.replace(tmp_path / "new", link)
    book.write(row(3))
    for _ in range(2):
        book.keep_up_once()
    assert idents(link) == [1, 3] and idents(db) == [1, 2]


# ---- the real server

def test_the_file_goes_while_keys_are_added(gateway, engine):
    """And while requests run: no 500, no traceback, whatever the moment."""
    engine.always([Json(completion("Hi"))])
    front = gateway()
    over, seen = threading.Event(), []

    def ask():
        while not over.is_set():
            seen.append(front.client().post(PATH, {"messages": HELLO}).status)
            seen.append(front.client().get("/v1/usage").status)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(3):
            front.db.unlink(missing_ok=True)
            done = front.keys("add", f"user{n}")
            assert "Traceback" not in done.stderr and done.returncode in (0, 1)
            key = done.stdout.strip().rpartition("\n")[2]
            if done.returncode == 0:
                assert front.client(key).get("/v1/models").status == 200
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
    assert set(seen) <= {200, 401, 503} and "Traceback" not in front.log
    assert read(front.db, "PRAGMA integrity_check") == [{"integrity_check": "ok"}]


@pytest.mark.parametrize("put", WAYS.values(), ids=WAYS)
def test_a_restore_under_load_and_a_kill(gateway, engine, put):
    """A backup is put in place while requests run; all is killed; the next start has the backup and what came after it."""
    engine.always([Json(completion("Hi"))])
    front = gateway()
    ask = lambda ident: front.client().post(PATH, {"messages": HELLO}, {"x-request-id": ident}).status    # noqa: E731
    assert [ask(f"before-{n}") for n in range(20)] == [200] * 20
    backup = front.db.with_name("backup.db")
    by_sqlite(front.db, backup)
    assert [ask(f"lost-{n}") for n in range(20)] == [200] * 20
    key = front.add_key("alice")
    assert front.client(key).get("/v1/models").status == 200
    put(backup, front.db)
    time.sleep(2 * keys.FRESH)
    assert front.client(key).get("/v1/models").status == 401        # made after the backup
    assert [ask(f"after-{n}") for n in range(20)] == [200] * 20
    row_of(front.db, "after-19", 5)
    front.kill()
    front.launch()
    front.wait_alive()
    found = [each["id"] for each in rows(front.db, "route LIKE 'POST%'")]
    assert found == [f"{part}-{n}" for part in ("before", "after") for n in range(20)]
    assert read(front.db, "PRAGMA integrity_check") == [{"integrity_check": "ok"}]


def test_a_start_on_a_damaged_file_is_one_line(gateway, engine):
    front = gateway()
    front.stop()
    open_database(front.db)
    write(*range(1000))
    damage(front.db)
    since = len(front.log)
    front.launch()
    assert front.process.wait(20) == 1
    assert front.log[since:].startswith("sparks: SPARKS_DB: ") and "put a backup in its place" in front.log[since:]
    assert front.log[since:].count("\n") == 1
