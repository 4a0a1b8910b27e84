"""OpenAI's Responses: whole answers and streams, each checked against the published schema."""
from support.openai_schema import event_problems, problems

PATH = "/v1/responses"
PNG = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
       "gg==")


def said(answer):
    """The events of a stream up to its one last event; each is valid, named, and counted."""
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = [event for event in answer.events() if event.comment is None]
    values = [event.json() for event in found]
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    assert [event.name for event in found] == [value["type"] for value in values]
    assert [problem for value in values for problem in event_problems(value)] == []
    ends = [kind for kind in types(values) if kind in ("completed", "incomplete", "failed")]
    assert len(ends) == 1 and types(values)[-1] == ends[0] and answer.complete
    return values


def types(values):
    return [value["type"].removeprefix("response.") for value in values]


def whole(answer):
    """A plain Response."""
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert problems("Response", answer.json()) == []
    return answer.json()
