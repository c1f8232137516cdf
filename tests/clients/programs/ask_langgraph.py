"""langgraph: agents that call tools and remember, over OpenAI's, Anthropic's and Ollama's APIs."""

from asked import ASKED, RESULT, TOO_HOT, agent, error_of, found, tell
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

calls = []
TURN = {"messages": [("user", ASKED.question)]}


def get_weather(city: str) -> str:
    """How it is outside."""
    calls.append({"city": city})
    return RESULT


def openai(key=ASKED.key, temperature=0, **more):
    given = {"base_url": ASKED.agent_base_url, "api_key": key, "max_retries": 0, "max_tokens": 50}
    return ChatOpenAI(model=ASKED.agent_model, temperature=temperature, **given, **more)


def responses(key=ASKED.key, **more):
    """What was said before is kept by the server."""
    return openai(key, use_responses_api=True, use_previous_response_id=True, **more)


def anthropic(key=ASKED.key, temperature=0):
    given = {"base_url": ASKED.agent_url, "api_key": key, "max_retries": 0, "max_tokens": 50}
    return ChatAnthropic(model=ASKED.agent_model, temperature=temperature, **given)


def ollama(key=ASKED.key, temperature=0):
    headers = {"Authorization": f"Bearer {key}"}
    given = {"base_url": ASKED.agent_url, "client_kwargs": {"headers": headers}, "num_predict": 50}
    return ChatOllama(model=ASKED.agent_model, temperature=temperature, **given)


def graph(model):
    return create_agent(model, [get_weather], checkpointer=InMemorySaver())


def thread(name):
    return {"configurable": {"thread_id": name}}


def asked(run):
    """What an agent calls, and what it says."""
    calls.clear()
    text = run()
    return agent([*calls], text)


for name, model in {
    "openai": openai,
    "responses": responses,
    "anthropic": anthropic,
    "ollama": ollama,
}.items():
    one = graph(model())

    def whole(one=one):
        said = one.invoke(TURN, thread("whole"))["messages"]
        assert [message.type for message in said] == ["human", "ai", "tool", "ai"]
        return said[-1].text

    def streamed(one=one):
        said = one.stream(TURN, thread("stream"), stream_mode="messages")
        last = ""
        for message, _ in said:
            if isinstance(message, AIMessageChunk | AIMessage):
                last += message.text
        return last

    found("agent", name, asked(whole))
    found("agent", f"{name} stream", asked(streamed))
    hot = graph(model(temperature=TOO_HOT))
    found("refused", name, error_of(hot.invoke, TURN, thread("hot")))
    denied = graph(model("wrong"))
    found("denied", name, error_of(denied.invoke, TURN, thread("denied")))
tell()
