// One loop of Vercel's AI SDK with a tool, by the provider that is named: prints the texts that the
// tool was called with, and how the model's steps ended.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const [name, baseURL] = process.argv.slice(2);
const options = { name: "kvlinker", baseURL, apiKey: "none" };
const create = {
  openai: createOpenAI,
  "openai-compatible": createOpenAICompatible,
  anthropic: createAnthropic,
}[name];
const read = [];
const { steps } = await generateText({
  model: create(options)("default"),
  maxOutputTokens: 64,
  tools: {
    read_file: tool({
      description: "Reads a file.",
      inputSchema: z.object({ path: z.enum(["notes.txt"]) }),
      execute: async ({ path }) => {
        read.push(path);
        return "Zebra crossing.";
      },
    }),
  },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
  stopWhen: stepCountIs(2),
  prompt: "What is the first word of notes.txt?",
});
console.log(JSON.stringify({ read, steps: steps.map((step) => step.finishReason) }));
