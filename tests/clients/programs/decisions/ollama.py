import json
import sys

import ollama

client = ollama.Client(host=sys.argv[1], trust_env=False)
questions: dict = {
    "safe": {"type": "noul", "instructions": "Is it safe?", "criteria": {"false": "it harms", "true": "it does not"}},
    "route": {"type": "choice", "instructions": {"ask": "Where to?"}, "criteria": {"sales": "orders", "help": None}},
    "good": {"type": "score", "instructions": "How good?", "criteria": ["bad", "fine", "good"]},
}
for label, state in (("text", "Refund me!"), ("json", {"mail": ["Refund me!", None]})):
    found = client.systemone("demo-vision", state, questions, keep_alive="5m")
    answers = found.answers
    print(f"{label} names:", list(answers))
    print(f"{label} classes:", [type(answer).__name__ for answer in answers.values()])
    print(f"{label} noul:", 0 <= answers["safe"].noul <= 1)
    print(f"{label} choice:", answers["route"].choice in questions["route"]["criteria"])
    print(f"{label} legend:", json.dumps(answers["good"].legend))
    sums = [sum(answers[name].probabilities.values()) for name in ("route", "good")]
    print(f"{label} sums:", [round(each, 6) for each in sums])
    print(f"{label} usage:", found.usage.input_tokens > 0, found.usage.output_tokens)
asked = {"type": "noul", "instructions": "Is it?"}
print("plain names:", list(client.systemone("demo-vision", "x", {"q": asked}).answers))
for bad in ({}, {"q": {"type": "score", "instructions": "x", "criteria": []}}):
    try:
        client.systemone("demo-vision", "x", bad)
    except ollama.ResponseError as error:
        print("refused:", error.status_code, error.error.partition(":")[0])
