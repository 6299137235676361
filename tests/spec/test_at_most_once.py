"""At most once: the answer to a write is lost after the server has applied it, and the retry changes nothing more.

Seeds 002 and 003, "Test Plan". A proxy loses the answer: `failCommand` can only fail a command before it is executed.
"""

from __future__ import annotations

import pytest
from pymongo.errors import AutoReconnect

from tests.flavours import resolve
from tests.spec.rig import POLICIES, WRITES, ids, transaction_id


async def _undisturbed(rig, write):
    """What the write answers and leaves behind when nothing happens to it."""
    at = rig()
    await at.seed()
    return await write.run(at), await at.data()


@pytest.mark.parametrize(
    ("policy", "write"),
    [("backpressure", write) for write in WRITES.values()]
    + [(policy, WRITES["update_one"]) for policy in POLICIES[1:]],
    ids=ids,
)
async def test_a_write_whose_answer_was_lost_is_applied_once(rig, instrument, proxy, policy, write):
    instrument(policy=policy)
    expected, left = await _undisturbed(rig, write)
    at = rig(proxy.uri, retryWrites=True)
    await at.seed()
    proxy.cut_reply(write.command)
    assert await write.run(at) == expected
    assert await at.data() == left
    first, second = at.commands.named(write.command)
    assert transaction_id(first) == transaction_id(second)
    assert not proxy.pending


async def test_a_write_whose_answer_was_lost_again_and_again_is_applied_once(rig, instrument, proxy):
    instrument(policy="persistent")
    at = rig(proxy.uri)
    await at.seed()
    proxy.cut_reply("update", times=4)
    result = await resolve(at.collection.update_one({"_id": 1}, {"$inc": {"x": 10}}))
    assert result.modified_count == 1
    assert (await at.data())[0]["x"] == 11
    assert at.commands.count("update") == 5
    assert len({transaction_id(event) for event in at.commands.named("update")}) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["update_many", "delete_many", "run_command", "off"])
async def test_a_write_that_nothing_marks_as_the_same_is_not_sent_again(rig, instrument, proxy, policy, name):
    """It was applied, and without a transaction ID a second time would be applied as well."""
    instrument(policy=policy)
    at = rig(proxy.uri, retryWrites=name != "off")
    await at.seed()
    command = "delete" if name == "delete_many" else "update"
    proxy.cut_reply(command)
    increment = {"$inc": {"x": 10}}
    with pytest.raises(AutoReconnect):
        if name == "update_many":
            await resolve(at.collection.update_many({"_id": 1}, increment))
        elif name == "delete_many":
            await resolve(at.collection.delete_many({"_id": 1}))
        elif name == "off":
            await resolve(at.collection.update_one({"_id": 1}, increment))
        else:
            updates = [{"q": {"_id": 1}, "u": increment}]
            await resolve(at.database.command("update", at.collection.name, updates=updates))
    (event,) = at.commands.named(command)
    assert "txnNumber" not in event.command
    assert [document["x"] for document in await at.data()] == (
        [2, 3] if name == "delete_many" else [11, 2, 3]
    )


async def test_a_read_whose_answer_was_lost_is_simply_read_again(rig, instrument, proxy):
    instrument()
    at = rig(proxy.uri)
    await at.seed()
    proxy.cut_reply("find")
    assert len(await at.data()) == 3
    assert at.commands.count("find") == 2


async def test_a_get_more_whose_answer_was_lost_skips_nothing_silently(rig, instrument, proxy):
    """The cursor has advanced: to repeat the command would lose the batch in between."""
    instrument()
    at = rig(proxy.uri)
    await at.seed()
    proxy.cut_reply("getMore")
    cursor = at.collection.find({}, batch_size=1)
    seen = []
    with pytest.raises(AutoReconnect):
        while True:
            seen.append(await resolve(cursor.next()))
    assert len(seen) == 1
    assert at.commands.count("getMore") == 1
