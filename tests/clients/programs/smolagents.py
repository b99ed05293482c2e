import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city.
    """
    return "It is hot."


model = OpenAIServerModel("scripted", api_base=f"{sys.argv[1]}/v1", api_key="unused")
question = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
print("chat:", model.generate(question).content)
print("stream:", "".join(delta.content or "" for delta in model.generate_stream(question)))
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
print("tool:", agent.run("Weather in Rome?"))
