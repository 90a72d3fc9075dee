"""Keys, certificates and invites: what they say, whom they keep out, and that nothing of them leaks."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import ssl
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.errors import UsageError
from isles.identity import Authority, Certified, Invite, Nkey, client_context, peer_name, server_context
from isles.identity.certificates import issue
from isles.identity.invite import MAX_LINE


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create()


@pytest.fixture(scope="module")
def invite(authority: Authority) -> Invite:
    return Invite.issue(authority, "reef-1", ("tls://store:4222",), "d" * 64)


def test_an_nkey_comes_back_from_its_seed_and_hides_it() -> None:
    for role, letter in (("operator", "O"), ("account", "A"), ("user", "U")):
        key = Nkey.new(role)  # type: ignore[arg-type]
        again = Nkey.from_seed(key.seed)
        assert again.public == key.public and again.role == role
        assert key.public.startswith(letter) and key.seed.startswith(f"S{letter}") and len(key.public) == 56
        assert key.seed not in repr(key)


@given(st.text(max_size=80))
def test_nothing_else_is_taken_for_a_seed(text: str) -> None:
    with pytest.raises(UsageError):
        Nkey.from_seed(text)


def test_the_authority_is_written_for_its_owner_only_and_read_back(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "authority.json"
    authority.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Authority.load(path)
    assert again.run == authority.run and again.account.public == authority.account.public
    assert "PRIVATE" not in repr(authority) + repr(authority.certified) and authority.account.seed not in repr(authority)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 2}', b'{"format": 1}', b"\xff"])
def test_a_damaged_authority_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "authority.json"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        Authority.load(path)
    with pytest.raises(UsageError, match="does not exist"):
        Authority.load(tmp_path / "none")


@pytest.mark.parametrize("name", ["", "A", "a.b", "a b", "-a", "x" * 64, "*", "a>"])
def test_names_that_could_mean_more_than_one_cluster_are_refused(authority: Authority, name: str) -> None:
    with pytest.raises(UsageError, match="no name for a cluster"):
        authority.certify(name)


def test_an_invite_travels_as_a_line_or_a_file(invite: Invite, tmp_path: Path) -> None:
    line = invite.to_line()
    assert Invite.from_text(line) == invite
    assert Invite.from_text(f"  {line[:70]}\n   {line[70:]} \n") == invite  # as mail programs break it
    invite.save(tmp_path / "reef-1.invite")
    assert stat.S_IMODE((tmp_path / "reef-1.invite").stat().st_mode) == 0o600
    assert Invite.load(tmp_path / "reef-1.invite") == invite
    assert invite.user.seed not in repr(invite) and "PRIVATE" not in repr(invite)


@given(st.data())
def test_an_invite_that_was_cut_or_altered_is_known(data: st.DataObject) -> None:
    line = _LINE
    if data.draw(st.booleans()):
        bad = line[: data.draw(st.integers(0, len(line) - 1))]
    else:
        at = data.draw(st.integers(0, len(line) - 1))
        bad = line[:at] + data.draw(st.sampled_from("!x~ä").filter(lambda c: c != line[at])) + line[at + 1 :]
    with pytest.raises(UsageError) as caught:
        Invite.from_text(bad)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


_LINE = Invite.issue(Authority.create(), "reef-1", ("tls://store:4222",), "d" * 64).to_line()


@pytest.mark.parametrize("text", ["", "hello", "isles2-abc", "isles1-", "isles1-" + "A" * 100, "isles1-" + "A" * MAX_LINE])
def test_what_is_no_invite_is_a_sentence(text: str) -> None:
    with pytest.raises(UsageError):
        Invite.from_text(text)


def test_a_missing_invite_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Invite.load(tmp_path / "none")


def test_a_clock_that_is_years_off_is_named(invite: Invite) -> None:
    invite.check_dates()
    for year, words in ((2001, "before the invite was made"), (2090, "was valid until")):
        with pytest.raises(UsageError, match=words) as caught:
            invite.check_dates(dt.datetime(year, 5, 6, tzinfo=dt.UTC))
        assert f"{year}-05-06" in str(caught.value)


WRITES = ("members.reef-1", "figures.reef-1", "ready.*.reef-1", "done.*.reef-1", "rounds.*", "ledger", "layout")


def test_tokens_are_signed_and_say_what_a_cluster_may_write(authority: Authority) -> None:
    import base64

    user = authority.admit("reef-1")
    head, body, signature = user.jwt.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    writes = [s for s in claims["nats"]["pub"]["allow"] if s.startswith("$KV")]
    assert writes == [f"$KV.run.{k}" for k in WRITES]
    assert claims["iss"] == authority.account.public and claims["sub"] == Nkey.from_seed(user.seed).public
    raw = base64.urlsafe_b64decode(signature + "==")
    authority.account.key.public_key().verify(raw, f"{head}.{body}".encode())
    assert user.seed not in repr(user)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Connect, and return whom the server saw."""

    async def play() -> str:
        seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.set_result(peer_name(writer.get_extra_info("ssl_object")))
            writer.write(await reader.read(1))
            writer.close()

        listening = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
            try:
                writer.write(b"x")
                if await reader.read(1) != b"x":
                    raise ConnectionError("the server hung up")
            finally:
                writer.close()
            return await seen

    return asyncio.run(asyncio.wait_for(play(), 10))


def test_clusters_of_a_run_know_each_other_and_nobody_else(authority: Authority) -> None:
    ca, a, b = authority.certified.certificate, authority.certify("a"), authority.certify("b")
    assert handshake(server_context(ca, a), client_context(ca, b), "a") == "b"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server_context(ca, a), client_context(ca, b), "c")
    other = Authority.create()
    foreign = other.certify("b")
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(server_context(ca, a), client_context(ca, foreign), "a")
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(server_context(other.certified.certificate, foreign), client_context(ca, b), "b")
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(server_context(ca, a), ssl.create_default_context(cadata=ca), "a")


def test_a_cluster_cannot_sign_for_another(authority: Authority) -> None:
    ca, a, b = authority.certified.certificate, authority.certify("a"), authority.certify("b")
    forged = issue(Certified(b.certificate, b.key), "a")
    chain = Certified(forged.certificate + b.certificate, forged.key)
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(server_context(ca, a), client_context(ca, chain), "a")
